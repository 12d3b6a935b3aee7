//! A table that workers look after by themselves, as its properties ask them to, under the fence of its shard. That is moved to another worker
//! now and then, in the midst of what its own does, where the cluster is the run's own. Under which fences they have committed is read while that goes on
//! ([`crate::check::fences`]); it is appended to and read as the others of the workload ([`super::hot`]).

use std::sync::atomic::Ordering;
use std::time::Duration;

use lake_client::clock;

use super::access::Access;
use super::hot::{Shared, UNHELD, append};
use super::statements::{SCHEMA, told};
use crate::check::hot::RETAINED;
use crate::history::{Fenced, Hot};
use crate::run::recorder::Scribe;
use crate::sql::{Failure, Value};

/// The table that workers look after by themselves. No other table's number comes so far.
pub(super) const TENDED: i64 = 1_000_000;
/// The probability that an operation is about that one.
pub(super) const ON_IT: f64 = 0.25;
/// Of these, the probability that its fences are read ...
pub(super) const FENCES: f64 = 0.15;
/// ... and that its shard is moved then.
const MOVES: f64 = 0.5;
/// How long snapshots of that table are kept, in seconds: each is there for several readings of the fences.
const TENDED_KEPT_S: u64 = 60;
/// How long a worker may take in the end until it has looked after that table, if none has before: twice the time from one look to
/// the next that nodes have by themselves.
const TENDED_WITHIN: Duration = Duration::from_secs(60);
/// The pause between two looks whether one has.
const TENDED_LOOK: Duration = Duration::from_millis(500);

/// What its properties ask for. `expired_age_s`: how old snapshots must be at least to expire.
pub(super) fn asks(expired_age_s: u64) -> String {
    let kept_ms = 1_000 * TENDED_KEPT_S.max(expired_age_s);
    format!(
        " WITH ({UNHELD}, 'lake.compaction.enabled' = 'true', 'lake.expire-snapshots.enabled' = 'true', \
         'history.expire.max-snapshot-age-ms' = '{kept_ms}', 'history.expire.min-snapshots-to-keep' = '{RETAINED}')"
    )
}

/// Reads the fences, and may have the shard moved. What they are is in the history.
pub(super) async fn look(shared: &Shared, node: u64, access: &mut Access, scribe: &mut Scribe) {
    if let Ok(Some(newest)) = read_fences(shared, node, access, scribe).await
        && access.chance(MOVES)
        && access.is_own()
    {
        move_shard(&newest, access).await;
    }
}

/// Under which fences workers have committed to [`TENDED`]. Gives the newest.
async fn read_fences(
    shared: &Shared,
    node: u64,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<Option<Fenced>, Failure> {
    let action = |line| shared.action(Hot::Fences { table: TENDED.into(), line });
    let of = |note: &str| format!("summary['lake.{note}']");
    let (shard, fence, worker) = (of("shard"), of("fence"), of("worker"));
    let sql = format!(
        "SELECT sequence_number, {shard} AS shard, {fence} AS fence, {worker} AS worker FROM {SCHEMA}.\"hot_{TENDED}$snapshots\" \
         WHERE {fence} IS NOT NULL ORDER BY 1"
    );
    let by = access.deadline();
    scribe.invoke(action(None));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let line: Vec<Fenced> = answer.rows.iter().filter_map(|row| fenced(row)).collect();
            let foreign = answer.rows.iter().find(|row| fenced(row).is_none());
            let newest = line.last().cloned();
            shared.is_tended.fetch_or(newest.is_some(), Ordering::Relaxed);
            told(scribe, action(Some(line)), None, node, foreign.map(Vec::as_slice));
            Ok(newest)
        }
        Err(failure) => {
            scribe.query_failed(action(None), &failure, node);
            Err(failure)
        }
    }
}

/// A row of that; `None` if no worker leaves such.
fn fenced(row: &[Value]) -> Option<Fenced> {
    let [Value::Int(sequence), Value::Text(shard), Value::Text(fence), Value::Text(worker)] = row else { return None };
    Some(Fenced {
        sequence: u64::try_from(*sequence).ok()?,
        shard: shard.parse().ok()?,
        fence: fence.parse().ok()?,
        worker: worker.clone(),
    })
}

/// Gives the shard of [`TENDED`] to another worker, in the midst of what its own does. It may be refused: then it stays.
async fn move_shard(newest: &Fenced, access: &Access) {
    let Ok(shard) = u32::try_from(newest.shard) else { return };
    let Ok(listed) = access.store.shards(access.deadline()).await else { return };
    let shards = &listed.value.shards;
    let own = shards.iter().find(|status| status.shard == shard).map(|status| &status.route.node);
    let mut others = shards.iter().map(|status| &status.route.node).filter(|node| Some(*node) != own);
    if let Some(other) = others.next() {
        let moved = access.store.move_shard(shard, other, false, access.deadline()).await;
        tracing::debug!(shard, to = %other, ?moved, "a shard was to be moved");
    }
}

/// Waits, when nothing is hurt any more, until a worker has looked after [`TENDED`], and has it find something to do.
pub(super) async fn await_worker(shared: &Shared, access: &mut Access, scribe: &mut Scribe) {
    let until = clock::now() + TENDED_WITHIN;
    while let Some(node) = access.any_node() {
        let is_made = shared.make(TENDED, node, access).await.is_ok();
        // Once more also if one has: what it has done last is seen as well.
        if is_made
            && read_fences(shared, node, access, scribe).await.is_ok()
            && shared.is_tended.load(Ordering::Relaxed)
        {
            return;
        }
        if clock::now() > until {
            return;
        }
        if is_made {
            append(shared, TENDED, node, access, scribe).await;
        }
        tokio::time::sleep(TENDED_LOOK).await;
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::history::{Action, Kind, Operation};
    use crate::run::recorder::Recorder;

    /// How a history has fences that are read so.
    async fn read(row: &[Value]) -> Operation {
        let (recorder, shared) = (Recorder::new(), Shared::new(true));
        read_fences(&shared, 1, &mut canned::access(&[row]), &mut recorder.scribe()).await.unwrap();
        recorder.take().0.pop().unwrap()
    }

    #[tokio::test]
    async fn a_snapshot_says_under_which_fence_it_was_made() {
        let text = |text: &str| Value::Text(text.to_owned());
        let row = [Value::Int(3), text("7"), text("20"), text("query-1")];
        let one = Fenced { sequence: 3, shard: 7, fence: 20, worker: "query-1".to_owned() };
        let ended = read(&row).await;
        assert_eq!((ended.kind, ended.error), (Kind::Ok, None));
        assert_eq!(ended.action, Action::Upkeep(Hot::Fences { table: TENDED.into(), line: Some(vec![one]) }));
        let row = [Value::Int(3), Value::Null, text("20"), text("query-1")];
        assert!(read(&row).await.error.is_some(), "a fence without its shard is nobody's");
    }
}
