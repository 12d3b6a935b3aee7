//! A table that workers look after by themselves, as its properties ask them to, under the fence of its shard. That is moved to another worker
//! now and then, in the midst of what its own does, where the cluster is the run's own. Under which fences they have committed is read while that goes on
//! ([`crate::check::fences`]); it is appended to and read as the others of the workload ([`super::hot`]).
//!
//! What they do without a snapshot is in their logs ([`WorkerChore`]), which are read in the end where all workers are of this machine: they say times
//! by its clock.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use lake_client::clock;
use lake_client::shards::WorkerChore;

use super::access::Access;
use super::hot::{Shared, UNHELD, append};
use super::statements::{SCHEMA, told};
use crate::check::hot::RETAINED;
use crate::history::{Fenced, Hot, Worked};
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
/// Chores that are read in the end: of two workers at work on the table without a pause, two a second each for hours. Of more than these
/// the later ones are left out, which hides something and makes nothing up.
const MOST_CHORES: usize = 50_000;
/// The longest line of a log that is looked at. One with a chore is shorter.
const LONGEST_LINE: u64 = 64 << 10;
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

/// What workers have done to [`TENDED`], by their logs.
pub(super) async fn read_chores(shared: &Shared, access: &Access, scribe: &mut Scribe) {
    let Some(logs) = access.logs() else { return };
    let action = |chores| shared.action(Hot::Worked { table: TENDED.into(), chores });
    let table = format!("{SCHEMA}.hot_{TENDED}");
    scribe.invoke(action(None));
    match tokio::task::spawn_blocking(move || chores_in(&logs, &table)).await {
        Ok(Ok(chores)) => scribe.ok(action(Some(chores)), None, None),
        Ok(Err(error)) => scribe.refused(action(None), &format!("the logs of query nodes cannot be read: {error}")),
        Err(error) => scribe.refused(action(None), &format!("reading the logs of query nodes ended: {error}")),
    }
}

/// The chores on one table, each as it was told last.
fn chores_in(logs: &[PathBuf], table: &str) -> io::Result<Vec<Worked>> {
    let mut chores = BTreeMap::new();
    for log in logs {
        let mut log = BufReader::new(File::open(log)?);
        let mut line = Vec::new();
        while log.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)? > 0 {
            let told = WorkerChore::of_line(&String::from_utf8_lossy(&line)).filter(|chore| chore.table == table);
            line.clear();
            let Some(WorkerChore { worker, shard, fence, what, began_ms, acted_ms, ended_ms, .. }) = told else {
                continue;
            };
            let key = (worker.clone(), began_ms, shard, fence, what.clone());
            if chores.len() < MOST_CHORES || chores.contains_key(&key) {
                chores.insert(key, Worked { shard: shard.into(), fence, worker, what, began_ms, acted_ms, ended_ms });
            }
        }
    }
    Ok(chores.into_values().collect())
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

    #[test]
    fn chores_are_read_from_logs_as_they_were_told_last() {
        let table = format!("{SCHEMA}.hot_{TENDED}");
        let begun = WorkerChore {
            worker: "query-1".to_owned(),
            shard: 7,
            fence: 20,
            table: table.clone(),
            what: "expire_snapshots".to_owned(),
            began_ms: 100,
            acted_ms: None,
            ended_ms: None,
        };
        let acted = WorkerChore { acted_ms: Some(110), ..begun.clone() };
        let ended = WorkerChore { ended_ms: Some(120), ..acted.clone() };
        let another = WorkerChore { table: "chaos.hot_1".to_owned(), ..ended.clone() };
        let next = WorkerChore { began_ms: 1100, ..begun.clone() };
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("query-1.log");
        let lines = [begun, acted, another, ended, next].map(|chore| format!("12:00 DEBUG m: {}\n", chore.to_line()));
        let other = "12:00 INFO nothing of that \u{fffd}\n".repeat(3);
        std::fs::write(&log, [other.as_bytes(), b"\xff\n", lines.concat().as_bytes()].concat()).unwrap();
        let one = Worked {
            shard: 7,
            fence: 20,
            worker: "query-1".to_owned(),
            what: "expire_snapshots".to_owned(),
            began_ms: 100,
            acted_ms: Some(110),
            ended_ms: Some(120),
        };
        let next = Worked { began_ms: 1100, acted_ms: None, ended_ms: None, ..one.clone() };
        assert_eq!(chores_in(std::slice::from_ref(&log), &table).unwrap(), [one, next]);
        assert!(chores_in(&[log, dir.path().join("query-2.log")], &table).is_err());
    }
}
