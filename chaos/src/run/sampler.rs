//! Looks at every peer several times a second: `samples.jsonl`, and the facts of the live line.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use lake_proto::v1::status_response::Stage;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::attack::InForce;
use super::ground::Ground;
use super::recorder::{Recorder, Tally};
use crate::report::sample::FILE_NAME;
use crate::report::{PeerSample, Sample};
use crate::{Error, IoContext, Result, probe};

/// How often peers are looked at.
pub const EVERY: Duration = Duration::from_millis(200);
/// Looks between two live lines.
const LIVE_EVERY: u32 = 5;

/// How a run is going, for people.
#[derive(Debug, Clone, Default)]
pub struct Live {
    pub elapsed: Duration,
    pub tally: Tally,
    /// Operations that succeeded per second, since the line before.
    pub rate: f64,
    pub leader: Option<u64>,
    pub term: u64,
    pub faults: Vec<String>,
}

/// The task that looks. Dropping it stops it as well.
#[derive(Debug)]
pub struct Sampler {
    task: JoinHandle<Result<()>>,
    stop: CancellationToken,
}

impl Sampler {
    /// Looks from now on; `dir` is the run's directory.
    pub fn start(
        ground: Arc<dyn Ground>,
        recorder: Arc<Recorder>,
        in_force: InForce,
        dir: &Path,
        live: watch::Sender<Live>,
    ) -> Self {
        let (path, stop) = (dir.join(FILE_NAME), CancellationToken::new());
        let stopped = stop.clone();
        let task = tokio::spawn(async move { sample(ground, recorder, in_force, &path, live, stopped).await });
        Self { task, stop }
    }

    /// Looks no more.
    ///
    /// # Errors
    /// The file could not be written.
    pub async fn stop(mut self) -> Result<()> {
        self.stop.cancel();
        let ended = |e| Err(Error::Io { doing: "looking at the peers".to_owned(), source: std::io::Error::other(e) });
        (&mut self.task).await.unwrap_or_else(ended)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

async fn sample(
    ground: Arc<dyn Ground>,
    recorder: Arc<Recorder>,
    in_force: InForce,
    path: &Path,
    live: watch::Sender<Live>,
    stop: CancellationToken,
) -> Result<()> {
    let doing = || format!("writing {}", path.display());
    let mut file = BufWriter::new(File::create(path).doing(doing)?);
    let mut ticks = interval(EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Live::default();
    for n in 0u32.. {
        tokio::select! {
            () = stop.cancelled() => break,
            _ = ticks.tick() => {}
        }
        let sample = look(ground.as_ref(), &recorder).await;
        serde_json::to_writer(&mut file, &sample).map_err(std::io::Error::from).doing(doing)?;
        file.write_all(b"\n").doing(doing)?;
        if n % LIVE_EVERY == 0 {
            let (elapsed, tally) = (recorder.elapsed(), recorder.tally());
            let seconds = (elapsed - last.elapsed).as_secs_f64().max(0.001);
            let rate = (tally.ok - last.tally.ok) as f64 / seconds;
            last = Live { elapsed, tally, rate, leader: sample.leader, term: sample.term, faults: in_force.names() };
            live.send_replace(last.clone());
        }
    }
    file.flush().doing(doing)
}

async fn look(ground: &dyn Ground, recorder: &Recorder) -> Sample {
    let answers = ground.statuses().await;
    let leader = probe::leader(&answers).and_then(|answer| Some(answer.self_.as_ref()?.id));
    let peer = |answer: &lake_proto::v1::StatusResponse| {
        Some(PeerSample {
            id: answer.self_.as_ref()?.id,
            stage: stage(answer.stage()).to_owned(),
            term: answer.term,
            applied: answer.applied_index,
            last: answer.last_log_index,
        })
    };
    Sample {
        time_ns: recorder.now_ns(),
        leader,
        term: answers.iter().map(|answer| answer.term).max().unwrap_or(0),
        peers: answers.iter().filter_map(peer).collect(),
    }
}

fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Unspecified => "unknown",
        Stage::Fresh => "fresh",
        Stage::Recovering => "recovering",
        Stage::Member => "member",
        Stage::Stopped => "stopped",
    }
}
