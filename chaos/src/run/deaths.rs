//! Peers and query nodes that end without having been told to: each is noted as it happens, with the end of its log.

use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::recorder::Recorder;
use crate::check::Death;
use crate::nemesis::field::Field;
use crate::process::{Event, ProcessName, Role};

/// Deaths that are noted one by one; of a peer that dies over and over the rest is counted.
const MAX_DEATHS: usize = 100;

/// Notes deaths until told to stop. Dropping it stops it as well.
#[derive(Debug)]
pub struct Deaths {
    task: JoinHandle<Vec<Death>>,
    stop: CancellationToken,
}

impl Deaths {
    /// From now on.
    pub fn watch(field: Arc<Field>, recorder: Arc<Recorder>) -> Self {
        let stop = CancellationToken::new();
        let mut events = field.cluster.events();
        let stopped = stop.clone();
        let task = tokio::spawn(async move {
            let mut deaths = Vec::new();
            loop {
                let event = tokio::select! {
                    biased;
                    event = events.recv() => event,
                    () = stopped.cancelled() => break,
                };
                match event {
                    Ok(Event::Died { process, how, signal, .. }) => {
                        if deaths.len() < MAX_DEATHS {
                            deaths.push(Death {
                                peer: process.id,
                                role: process.role,
                                time_ns: recorder.now_ns(),
                                how,
                                signal,
                                last_lines: field.cluster.last_words(process).lines().map(str::to_owned).collect(),
                                excused: field.damage_of(process.id).filter(|_| process.role == Role::Metasrv),
                            });
                        }
                    }
                    // Those that were missed are in the processes' own counts.
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => break,
                }
            }
            deaths
        });
        Self { task, stop }
    }

    /// What was noted, and how many deaths were not.
    pub async fn stop(mut self, field: &Field) -> Vec<Death> {
        self.stop.cancel();
        let mut deaths = (&mut self.task).await.unwrap_or_default();
        let members = field.roster.ids();
        let is_out = |death: &Death| death.role == Role::Metasrv && !members.contains(&death.peer);
        for death in deaths.iter_mut().filter(|death| is_out(death) && death.excused.is_none()) {
            death.excused = Some("it was taken out of the cluster".to_owned());
        }
        let nodes = field.query_nodes.ids().into_iter().map(ProcessName::query);
        for name in members.into_iter().map(ProcessName::metasrv).chain(nodes) {
            let Ok(process) = field.cluster.process(name) else { continue };
            let state = process.state();
            let is_its = |death: &&Death| (death.role, death.peer) == (name.role, name.id);
            let noted = deaths.iter().filter(is_its).count() as u64;
            if state.deaths > noted {
                let last = state.last_exit.unwrap_or_default();
                deaths.push(Death {
                    peer: name.id,
                    role: name.role,
                    how: format!("ended {} more times; the last time it {last}", state.deaths - noted),
                    excused: field.damage_of(name.id).filter(|_| name.role == Role::Metasrv),
                    ..Death::default()
                });
            }
        }
        deaths
    }
}

impl Drop for Deaths {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}
