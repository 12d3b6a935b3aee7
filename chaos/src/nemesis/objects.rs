//! Faults of the object store, on the way to it that a run has made.

use async_trait::async_trait;
use rand::rngs::StdRng;

use super::field::{Field, PROOF_WITHIN};
use super::{Done, Nemesis};
use crate::net::objects::Trouble;
use crate::probe;

/// What it is done to, for people.
const STORE: &str = "the object store";

/// One kind of trouble, for all query nodes.
pub struct Troubled(pub Trouble);

#[async_trait]
impl Nemesis for Troubled {
    async fn start(&mut self, field: &Field, _rng: &mut StdRng) -> Done {
        let Some(objects) = &field.objects else {
            return Done::skipped(STORE, "this run has none: ask for one with --warehouse s3://... and --s3-endpoint");
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
                Done::installed(STORE, format!("{} {} in all", objects.met(self.0), self.0.done()))
            }
            None => Done::skipped(STORE, "this run has none"),
        }
    }
}
