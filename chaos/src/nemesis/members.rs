//! Faults that change who belongs to the cluster: a data directory is lost and its peer replaced, peers come and go.

use std::path::Path;

use async_trait::async_trait;
use lake_proto::v1::Member;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::field::{Field, MEND_WITHIN, named};
use super::kind::Target;
use super::{Done, Nemesis, process};
use crate::net::{Network, Node};
use crate::process::ProcessName;
use crate::{Error, IoContext, Result, probe};

/// How often a leader is chosen anew that is to go, and does not lead any more when it is to.
const LEADERS: usize = 5;
const NO_SPARE: &str = "no peer is left that was never started";

/// As an operator names a peer.
fn member(field: &Field, id: u64) -> Result<Member> {
    let entry = field.cluster.entry(ProcessName::metasrv(id))?;
    let grpc_address = field.network.address(Node::Clients, Node::Peer(id)).unwrap_or_default();
    let raft_address = match &field.network {
        // What others reach it by is told to them when they start.
        Network::Proxies(_) => entry.addresses.get("raft").cloned(),
        Network::Namespaces(_) => field.network.address(Node::Peer(id), Node::Peer(id)),
    };
    let raft_address = raft_address.unwrap_or_default();
    Ok(Member { id, raft_address, grpc_address, incarnation: String::new() })
}

fn refused(doing: &str, error: &lake_client::Error) -> Error {
    Error::Founding(format!("{doing}: {error}"))
}

/// Empties a data directory. What was written before there was a log, and the log, stay: they are for people.
fn empty(dir: &Path) -> Result<usize> {
    let doing = || format!("emptying {}", dir.display());
    let mut removed = 0;
    for entry in std::fs::read_dir(dir).doing(doing)? {
        let path = entry.doing(doing)?.path();
        if path.extension().is_some_and(|extension| extension == "log") {
            continue;
        }
        match path.is_dir() {
            true => std::fs::remove_dir_all(&path).doing(doing)?,
            false => std::fs::remove_file(&path).doing(doing)?,
        }
        removed += 1;
    }
    Ok(removed)
}

/// Puts a fresh peer in the place of one that is lost for good, whose process is stopped.
///
/// # Errors
/// No spare peer is left, or the cluster does not take it in.
pub(super) async fn replace(field: &Field, lost: u64) -> Result<u64> {
    let spare = field.take_spare().ok_or_else(|| Error::Founding(NO_SPARE.to_owned()))?;
    field.cluster.start_one(ProcessName::metasrv(spare)).await?;
    let by = member(field, spare)?;
    // It asks to join by itself, and changes are made one by one.
    probe::until("a lost peer to be replaced", MEND_WITHIN, || async {
        field.store.replace(lost, by.clone(), field.deadline()).await.map(|_| ()).map_err(|e| e.to_string())
    })
    .await?;
    field.enlist(spare);
    field.roster.remove(lost);
    field.cluster.process(ProcessName::metasrv(lost))?.stop().await?;
    Ok(spare)
}

/// One peer loses its directory. It is started on the empty one, which must do no harm, and then replaced.
pub struct Wipe {
    target: Option<Target>,
    wiped: Option<u64>,
}

impl Wipe {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, wiped: None }
    }
}

#[async_trait]
impl Nemesis for Wipe {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let id = match field.claim_one(self.target, rng).await {
            Ok(id) => id,
            Err(why) => return Done::failed("nobody", why),
        };
        self.wiped = Some(id);
        let wiped = async {
            process::kill(field, id).await?;
            let name = ProcessName::metasrv(id);
            field.lose(id, "its directory was emptied");
            let dir = field.cluster.entry(name)?.data_dir;
            let removed = empty(&dir)?;
            if removed == 0 {
                return Err(Error::Directory { dir, problem: "there was nothing in it to be lost".to_owned() });
            }
            field.cluster.start_one(name).await?;
            let stage = field.status(id).await.map(|status| status.stage());
            let spare = replace(field, id).await?;
            Ok::<_, Error>((removed, stage, spare))
        };
        match wiped.await {
            Ok((removed, stage, spare)) => {
                let stage = stage.map_or("silent", |stage| stage.as_str_name());
                let proof = format!(
                    "{removed} files and directories removed; then it was {stage}; peer {spare} is in its place"
                );
                Done::installed(named(&[id]), proof)
            }
            Err(e) => Done::failed(named(&[id]), e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        let Some(id) = self.wiped.take() else { return Done::skipped("nobody", "nobody was wiped") };
        field.release(&[id]);
        match field.roster.ids().contains(&id) {
            true => Done::failed(named(&[id]), "it was not replaced"),
            false => Done::installed(named(&[id]), "it was replaced"),
        }
    }
}

/// A fresh peer joins and is made a voter; then some voter, perhaps the leader, is taken out.
pub struct Churn {
    /// Who goes.
    target: Option<Target>,
    /// Who was to come, if that has failed so far.
    coming: Option<u64>,
    /// Who goes once somebody has come: by this chance.
    joined: Option<StdRng>,
}

impl Churn {
    pub fn new(target: Option<Target>) -> Self {
        Self { target, coming: None, joined: None }
    }

    async fn who_goes(&self, field: &Field, rng: &mut StdRng) -> Result<u64, String> {
        let meant = self.target.unwrap_or(if rng.random_bool(0.5) { Target::Leader } else { Target::One });
        let one = match field.pick(meant, rng).await {
            Err(_) if self.target.is_none() => field.pick(Target::One, rng).await?,
            picked => picked?,
        };
        one.first().copied().ok_or_else(|| "there is no peer".to_owned())
    }
}

#[async_trait]
impl Nemesis for Churn {
    async fn start(&mut self, field: &Field, rng: &mut StdRng) -> Done {
        let Some(spare) = field.take_spare() else { return Done::failed("nobody", NO_SPARE) };
        self.coming = Some(spare);
        let joined = async {
            field.cluster.start_one(ProcessName::metasrv(spare)).await?;
            let by = member(field, spare)?;
            field.store.join(by, field.deadline()).await.map_err(|e| refused("joining", &e))?;
            probe::until("it to be a voter", MEND_WITHIN, || async {
                match field.store.promote(spare, field.deadline()).await {
                    Ok(answer) if answer.voter => Ok(()),
                    Ok(answer) => Err(format!("it lacks {} entries", answer.lag_entries)),
                    Err(e) => Err(e.to_string()),
                }
            })
            .await
        };
        match joined.await {
            Ok(()) => {
                self.coming = None;
                field.enlist(spare);
                self.joined = Some(StdRng::from_rng(rng));
                Done::installed(named(&[spare]), format!("voters: {}", named(&field.roster.ids())))
            }
            Err(e) => Done::failed(named(&[spare]), e),
        }
    }

    async fn stop(&mut self, field: &Field) -> Done {
        if let Some(half) = self.coming.take() {
            return turn_away(field, half).await;
        }
        let Some(mut rng) = self.joined.take() else { return Done::skipped("nobody", "nobody had joined") };
        let mut chosen = 0;
        let (id, led) = loop {
            let id = match self.who_goes(field, &mut rng).await {
                Ok(id) => id,
                Err(why) => return Done::failed("nobody", why),
            };
            let led = field.leader().await == Some(id);
            chosen += 1;
            if led || self.target != Some(Target::Leader) || chosen == LEADERS {
                break (id, led);
            }
        };
        let removed = probe::until("a voter to be taken out", MEND_WITHIN, || async {
            field.store.remove(id, false, field.deadline()).await.map(|_| ()).map_err(|e| e.to_string())
        });
        if let Err(e) = removed.await {
            return Done::failed(named(&[id]), e);
        }
        field.roster.remove(id);
        let stopped = async { field.cluster.process(ProcessName::metasrv(id))?.stop().await };
        match stopped.await {
            Ok(()) => taken_out(self.target, id, led, &field.roster.ids()),
            Err(e) => Done::failed(named(&[id]), e),
        }
    }
}

/// What came of it. `led`: it did just before it was taken out; who asks for the leader has it only then.
fn taken_out(asked: Option<Target>, id: u64, led: bool, voters: &[u64]) -> Done {
    let it = if led { "the leader" } else { "it" };
    let told = format!("{it} was taken out; voters: {}", named(voters));
    match asked {
        Some(Target::Leader) if !led => Done::failed(named(&[id]), format!("it did not lead any more; {told}")),
        _ => Done::installed(named(&[id]), told),
    }
}

/// A peer that has not come to vote, but may have joined, is taken out again: it would be neither here nor there.
async fn turn_away(field: &Field, id: u64) -> Done {
    let known = |members: &[Member]| members.iter().any(|member| member.id == id);
    let gone = probe::until("a peer that did not come to vote to be taken out", MEND_WITHIN, || async {
        let answers = field.statuses().await;
        let leader = probe::leader(&answers).ok_or_else(|| "nobody leads".to_owned())?;
        if !known(&leader.voters) && !known(&leader.learners) {
            return Ok(());
        }
        field.store.remove(id, false, field.deadline()).await.map(|_| ()).map_err(|e| e.to_string())
    });
    let gone = gone.await;
    let stopped = async { field.cluster.process(ProcessName::metasrv(id))?.stop().await };
    match gone.and(stopped.await) {
        Ok(()) => Done::installed(named(&[id]), "it had not come to vote, and is gone again"),
        Err(e) => Done::failed(named(&[id]), e),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_to_go_as_the_leader_must_lead_when_it_does() {
        for (asked, led, is_installed) in [
            (Some(Target::Leader), true, true),
            (Some(Target::Leader), false, false),
            (Some(Target::One), false, true),
            (None, true, true),
            (None, false, true),
        ] {
            assert_eq!(taken_out(asked, 2, led, &[1, 3]).is_installed(), is_installed, "{asked:?}, led: {led}");
        }
    }
}
