//! Faults of the object store, on the way to it that a run has made: for all query nodes, or for some.

use std::time::Duration;

use async_trait::async_trait;
use rand::Rng;
use rand::rngs::StdRng;

use super::field::{Field, PROOF_WITHIN, called};
use super::kind::Target;
use super::{Done, Nemesis};
use crate::net::condition::Cut;
use crate::net::objects::{HELD, Trouble};
use crate::probe;
use crate::process::Role;

/// What it is done to, for people.
const STORE: &str = "the object store";
/// Why it cannot be had.
const NONE: &str = "this run has none: ask for one with --warehouse s3://... and --s3-endpoint";
/// How long each of those that are cut off may take to meet that: of several one may be asked for nothing for a while.
const CUT_PROOF_WITHIN: Duration = PROOF_WITHIN.saturating_mul(2);

/// One kind of trouble, for all query nodes.
pub struct Troubled(pub Trouble);

#[async_trait]
impl Nemesis for Troubled {
    async fn start(&mut self, field: &Field, _rng: &mut StdRng) -> Done {
        let Some(objects) = &field.objects else {
            return Done::skipped(STORE, NONE);
        };
        let Troubled(trouble) = *self;
        let before = objects.met(trouble);
        objects.begin(trouble);
        let met = || async {
            match objects.met(trouble) - before {
                0 => Err("nothing was asked of it".to_owned()),
                times => Ok(times),
            }
        };
        match probe::until("somebody to meet the fault", PROOF_WITHIN, met).await {
            Ok(times) => Done::installed(STORE, format!("{times} {}", trouble.done())),
            Err(e) => Done::failed(STORE, e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        match &field.objects {
            Some(objects) => {
                objects.end(self.0);
                let proof = format!("{} {} in all", objects.met(self.0), self.0.done());
                if self.0 != Trouble::Late {
                    return Done::installed(STORE, proof);
                }
                let arrived = || async {
                    match objects.held() {
                        0 => Ok(()),
                        held => Err(format!("{held} are held still")),
                    }
                };
                // Those of a node that is cut off meanwhile arrive once it is let back.
                let _ = probe::until("requests that are held to arrive", HELD + PROOF_WITHIN, arrived).await;
                let overdue = objects.overdue();
                Done::installed(STORE, format!("{proof}, {overdue} arrived after their senders had given up"))
            }
            None => Done::skipped(STORE, "this run has none"),
        }
    }
}

/// Query nodes that do not reach the object store. Others do, and all of them reach the metadata and their clients.
pub struct CutOff {
    target: Option<Target>,
    claimed: Vec<u64>,
}

impl CutOff {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, claimed: Vec::new() }
    }
}

#[async_trait]
impl Nemesis for CutOff {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let Some(objects) = &field.objects else { return Done::skipped(STORE, NONE) };
        // One that is killed or stands still asks for nothing, which would show no cut.
        self.claimed = match field.claim_of(Role::Query, self.target, rng).await {
            Ok(claimed) => claimed,
            Err(why) => return Done::failed("nobody", why),
        };
        let how = if rng.random_bool(0.5) { Cut::Silent } else { Cut::Reset };
        let before: Vec<(u64, u64)> = self.claimed.iter().map(|id| (*id, objects.cuts_met(*id))).collect();
        objects.cut_off(&self.claimed, how);
        let mut came = Vec::new();
        for (id, before) in before {
            let met = || async move {
                match objects.cuts_met(id) - before {
                    0 => Err("it asked for nothing".to_owned()),
                    times => Ok(format!("it met the cut {times} times")),
                }
            };
            let met = probe::until("a query node to meet the cut", CUT_PROOF_WITHIN, met).await;
            came.push((id, met.map_err(|e| e.to_string())));
        }
        Done::of_all(called(Role::Query), &came)
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let claimed = std::mem::take(&mut self.claimed);
        let Some(objects) = &field.objects else { return Done::skipped(STORE, NONE) };
        objects.let_back(&claimed);
        field.release_of(Role::Query, &claimed);
        Done::installed("all query nodes", "nothing is cut")
    }
}
