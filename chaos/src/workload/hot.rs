//! Rows that are appended by many clients to one table at a time, through any query node: what waits at the same time is committed
//! together, and where two nodes are at it one commits for the other.
//!
//! An append is one INSERT of [`Table::PARTS`] rows, sent once and without an operation id. A read counts the rows of each append. A
//! table is left after [`USES`] operations.
//!
//! With upkeep, small files are packed, snapshots expire, and copies of the table, which borrow its files, are dropped and purged meanwhile, all
//! the time and at any node: whatever is read must be there. Where the tables' files are this machine's, orphans are swept as well
//! ([`super::swept`]). What no table has had of all this when the faults are over is done to the newest then, before everything is read.
//!
//! One more table has what workers do by themselves ([`super::tended`]). Some reads are of what was there a while ago ([`super::past`]).

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use lake_client::clock;
use lake_client::store::Error;
use rand::Rng;

use super::access::Access;
use super::statements::{Last, PAUSE, SCHEMA, Used, count_of, make_schema, read_everywhere, stale_ms, told};
use super::tended::{self, TENDED};
use super::{Actor, Frame, Plan, past, swept};
use crate::check::hot::{EXPIRES_BEYOND_S, RETAINED, TORN};
use crate::history::{Action, Chore, Hot, Key, Table};
use crate::run::recorder::Scribe;
use crate::sql::{Answer, Failure, Value};

/// Operations on one table: each commit writes down all snapshots that there are, and a read opens a file for each append, which an object
/// store that is slow, or shares its processors with all the rest, gives a few of at a time.
const USES: u64 = 200;
/// The probability of a read.
const READS: f64 = 0.08;
/// With upkeep: more reads, that many of a hundred operations are chores, and tables are used for longer, so that there is something to
/// pack and to expire.
const READS_WITH_UPKEEP: f64 = 0.3;
const CHORES: f64 = 0.14;
const USES_WITH_UPKEEP: u64 = 2_000;
/// Files are packed in so many seconds of so many: were it all the time, no file would be in use that an expired snapshot had, and an
/// expiry that takes such files along would not show.
const PACKS_FOR_S: u64 = 10;
const PACKS_EVERY_S: u64 = 30;
/// Why a chore is refused that changed nothing.
const NOTHING_TO_DO: &str = "there was nothing to do";
/// How much longer than two statements, in seconds, a file must have been there before it is made to look old.
const AGED_BEYOND_S: u64 = 10;
/// How long the purges of a run may take until one is done: a worker looks through every table first.
const PURGED_WITHIN: Duration = Duration::from_secs(30);
/// How often a chore that no table has had is tried in the end.
const TRIES: usize = 3;
/// What reads ask for of each append.
pub(super) const COUNTED: &str = "SELECT id, count(*), min(v), max(v), sum(v)";

pub(super) fn plan(clients: usize) -> Plan {
    plan_as(clients, false)
}

pub(super) fn plan_with_upkeep(clients: usize) -> Plan {
    plan_as(clients, true)
}

fn plan_as(clients: usize, upkeep: bool) -> Plan {
    let shared = Arc::new(Shared::new(upkeep));
    let client = |_| Client { shared: shared.clone() };
    Plan::of(clients, client, Tables { shared: shared.clone() })
}

/// What clients know together.
#[derive(Debug)]
pub(super) struct Shared {
    upkeep: bool,
    used: Used,
    /// The chores that have changed something, and of which table.
    done: Mutex<BTreeSet<(i64, Chore)>>,
    began: Instant,
    /// How long each operation of the load may take.
    timeout: OnceLock<Duration>,
    /// A worker was seen to have looked after the table that it is to.
    pub(super) is_tended: AtomicBool,
}

impl Shared {
    pub(super) fn new(upkeep: bool) -> Self {
        let used = Used::new(if upkeep { USES_WITH_UPKEEP } else { USES });
        let (began, timeout) = (clock::now(), OnceLock::new());
        Self { upkeep, used, done: Mutex::default(), began, timeout, is_tended: AtomicBool::new(false) }
    }

    /// How old a file is that no statement under way has written.
    fn settled(&self, access: &Access) -> Duration {
        2 * *self.timeout.get().unwrap_or(&access.timeout) + Duration::from_secs(AGED_BEYOND_S)
    }

    /// Whether files are packed now.
    fn packs(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began).as_secs() % PACKS_EVERY_S < PACKS_FOR_S
    }

    fn done(&self) -> BTreeSet<(i64, Chore)> {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A chore has changed something.
    fn has_done(&self, table: i64, what: Chore) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).insert((table, what));
    }

    /// The newest table and the chores that it has not had; none if any table has had them all.
    fn left(&self, wanted: &[Chore]) -> (i64, Vec<Chore>) {
        let (done, tables) = (self.done(), self.kept());
        let left = |table: i64| wanted.iter().copied().filter(|what| !done.contains(&(table, *what))).collect();
        let newest = self.newest().unwrap_or_default();
        let is_settled = tables.iter().any(|table| Vec::<Chore>::is_empty(&left(*table)));
        (newest, if is_settled { Vec::new() } else { left(newest) })
    }

    fn newest(&self) -> Option<i64> {
        self.kept().into_iter().max()
    }

    /// The tables that clients do chores of.
    fn kept(&self) -> Vec<i64> {
        self.used.all().into_iter().filter(|table| *table != TENDED).collect()
    }

    /// Of this workload.
    pub(super) fn action(&self, hot: Hot) -> Action {
        if self.upkeep { Action::Upkeep(hot) } else { Action::Hot(hot) }
    }

    /// Makes a table unless it is there.
    pub(super) async fn make(&self, table: i64, node: u64, access: &mut Access) -> Result<(), Failure> {
        let asks = match table == TENDED {
            true => tended::asks(expired_age_s(access.timeout)),
            // The clients say how old what expires is.
            false => format!(" WITH ({UNHELD})"),
        };
        let sql = format!("CREATE TABLE IF NOT EXISTS {} (id BIGINT, v BIGINT){asks}", name(table));
        self.used.make(table, &sql, node, access).await
    }
}

/// The property by which snapshots expire as young as they are asked to: no statement of a run takes as long as some may.
pub(super) const UNHELD: &str = "'lake.expire-snapshots.held-ms' = '0'";

pub(super) fn name(table: i64) -> String {
    format!("{SCHEMA}.hot_{table}")
}

/// How old snapshots are that expire, in seconds: no statement loses what it reads, also at a node that shows what was there a second
/// ago. One that is cut off may: that is for the check to know.
pub(super) fn expired_age_s(timeout: Duration) -> u64 {
    timeout.as_secs() + EXPIRES_BEYOND_S
}

struct Client {
    shared: Arc<Shared>,
}

#[async_trait]
impl Actor for Client {
    async fn step(&mut self, access: &mut Access, scribe: &mut Scribe) {
        self.shared.timeout.get_or_init(|| access.timeout);
        let table = match self.shared.upkeep && access.chance(tended::ON_IT) {
            true => TENDED,
            false => self.shared.used.tables.pick(&mut access.rng),
        };
        let Some(node) = access.any_node() else { return };
        // Whoever comes next tries again.
        if self.shared.make(table, node, access).await.is_err() {
            return;
        }
        if self.shared.upkeep && access.chance(past::LOOKS_BACK) {
            return past::look_back(&self.shared, table, node, access, scribe).await;
        }
        if access.chance(if self.shared.upkeep { READS_WITH_UPKEEP } else { READS }) {
            // How it ended is in the history.
            let _ = read(&self.shared, table, node, access, scribe).await;
            return;
        }
        if table == TENDED && access.chance(tended::FENCES) {
            return tended::look(&self.shared, node, access, scribe).await;
        }
        if self.shared.upkeep && table != TENDED && access.chance(CHORES) {
            let what = match access.rng.random_range(0..8) {
                0..3 if self.shared.packs(clock::now()) => Chore::Pack,
                0..6 => Chore::Expire,
                6 if access.warehouse().is_some() => Chore::Sweep,
                // On hosts a purge waits for as long as it is set to there, a day say.
                7 if access.warehouse().is_some() => Chore::Purge,
                _ => Chore::Expire,
            };
            return keep_up(&self.shared, table, what, node, access, scribe).await;
        }
        append(&self.shared, table, node, access, scribe).await;
    }
}

/// One INSERT; gives its number if it was acknowledged.
pub(super) async fn append(
    shared: &Shared,
    table: i64,
    node: u64,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Option<i64> {
    let number = shared.used.numbers.next();
    let action = shared.action(Hot::Append { table: table.into(), number });
    let by = access.deadline();
    scribe.invoke(action.clone());
    match access.run(node, &statement(table, number), None, by).await {
        Ok(answer) => match count_of(&answer) {
            Some(count) if count == Table::PARTS as i64 => {
                scribe.ok(action, None, Some(node));
                shared.used.acknowledge();
                return Some(number);
            }
            count => {
                let what = format!("it has written {count:?} rows instead of {}", Table::PARTS);
                scribe.amiss(action, None, Some(node), &what);
            }
        },
        Err(failure) => scribe.statement_failed(action, &failure, node),
    }
    None
}

fn statement(table: i64, number: i64) -> String {
    let rows = Table::values(number).into_iter().map(|value| format!("({number}, {value})"));
    format!("INSERT INTO {} VALUES {}", name(table), rows.collect::<Vec<_>>().join(", "))
}

/// Makes files of a table look old, and one of them an orphan. Gives why that could not be.
async fn age(table: i64, number: i64, older_than: Duration, access: &Access) -> Result<(), Failure> {
    let failed = |why: String| Failure::unreached(format!("making files of table {table} look old: {why}"));
    let warehouse = access.warehouse().ok_or_else(|| failed("they are not this machine's".to_owned()))?;
    let aged = tokio::task::spawn_blocking(move || {
        swept::age(&swept::locations(&warehouse, SCHEMA, &format!("hot_{table}"))?, older_than, number)
    });
    aged.await.map_err(|e| failed(e.to_string()))?.map_err(|e| failed(e.to_string()))
}

/// Drops a copy of a table, which has borrowed its files if these are this machine's, with PURGE. Gives what the drop answers.
async fn purge(table: i64, number: i64, node: u64, access: &mut Access, by: Instant) -> Result<Answer, Failure> {
    let copy = format!("{}_copy_{number}", name(table));
    access.run(node, &format!("CREATE TABLE {copy} AS SELECT * FROM {}", name(table)), None, by).await?;
    let own = |dir: PathBuf| swept::locations(&dir, SCHEMA, &format!("hot_{table}")).ok();
    let mut data =
        access.warehouse().and_then(own).unwrap_or_default().into_iter().map(|location| location.join("data"));
    if let Some(data) = data.find(|data| data.is_dir()) {
        let source = format!("file://{}/", data.display());
        // Files may go just then: without them it is a copy like any other.
        let _ = access.run(node, &format!("CALL system.add_files('{copy}', '{source}')"), None, by).await;
    }
    access.run(node, &format!("DROP TABLE {copy} PURGE"), None, by).await
}

/// Does a chore. One that found nothing to do shows nothing, and is no success.
async fn keep_up(shared: &Shared, table: i64, what: Chore, node: u64, access: &mut Access, scribe: &mut Scribe) {
    let (name, number) = (name(table), shared.used.numbers.next());
    let sql = match what {
        Chore::Sweep => format!("CALL system.remove_orphan_files('{name}', older_than_hours => 24, dry_run => false)"),
        Chore::Purge => String::new(),
        Chore::Pack => format!("CALL system.rewrite_data_files('{name}', min_input_files => 2)"),
        Chore::Expire => {
            let age_s = expired_age_s(access.timeout);
            format!(
                "CALL system.expire_snapshots('{name}', older_than => now() - INTERVAL '{age_s} seconds', retain_last => {RETAINED})"
            )
        }
    };
    let action = shared.action(Hot::Chore { table: table.into(), what });
    let by = access.deadline();
    scribe.invoke(action.clone());
    if what == Chore::Sweep
        && let Err(failure) = age(table, number, shared.settled(access), access).await
    {
        return scribe.statement_failed(action, &failure, node);
    }
    let done = match what {
        Chore::Purge => purge(table, number, node, access, by).await,
        _ => access.run(node, &sql, None, by).await,
    };
    match done {
        Ok(_) if what == Chore::Purge => {
            scribe.ok(action, None, Some(node));
            shared.has_done(table, what);
        }
        Ok(answer) => match count_of(&answer) {
            Some(0) => scribe.refused(action, NOTHING_TO_DO),
            Some(_) => {
                scribe.ok(action, None, Some(node));
                shared.has_done(table, what);
            }
            None => scribe.unknown(action, "the answer does not say how much was done"),
        },
        Err(failure) => scribe.statement_failed(action, &failure, node),
    }
}

/// Does what no table has had yet, when nothing is hurt any more: a short run, or one under many faults, may have come to none of some
/// chore. Sweeps once more in any case: by now most files look old, and nothing takes the place of one that should not go.
async fn make_up(shared: &Shared, access: &mut Access, scribe: &mut Scribe) {
    let wanted: Vec<Chore> = [Chore::Pack, Chore::Expire, Chore::Sweep, Chore::Purge]
        .into_iter()
        .filter(|what| matches!(what, Chore::Pack | Chore::Expire) || access.warehouse().is_some())
        .collect();
    for _ in 0..TRIES {
        let (table, left) = shared.left(&wanted);
        for what in left {
            let Some(node) = access.any_node() else { return };
            keep_up(shared, table, what, node, access, scribe).await;
        }
    }
    if let (Some(table), Some(node), Some(_)) = (shared.newest(), access.any_node(), access.warehouse()) {
        keep_up(shared, table, Chore::Sweep, node, access, scribe).await;
    }
}

/// Counts the rows of each append.
async fn read(shared: &Shared, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
    let action = |whole, odd, stale_ms| shared.action(Hot::Read { table: table.into(), whole, odd, stale_ms });
    let sql = format!("{COUNTED} FROM {} GROUP BY id", name(table));
    let by = access.deadline();
    scribe.invoke(action(None, BTreeMap::new(), None));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let (whole, odd, foreign) = appends(&answer);
            told(scribe, action(Some(whole), odd, stale_ms(&answer)), None, node, foreign);
            Ok(())
        }
        Err(failure) => {
            let failure = past::gone(failure);
            scribe.query_failed(action(None, BTreeMap::new(), None), &failure, node);
            Err(failure)
        }
    }
}

/// What a read of [`COUNTED`] has answered: the appends that are whole, the rows of others, and a row that cannot be there.
pub(super) fn appends(answer: &Answer) -> (Vec<i64>, BTreeMap<Key, i64>, Option<&[Value]>) {
    let (mut whole, mut odd, mut foreign) = (Vec::new(), BTreeMap::<Key, i64>::new(), None);
    for row in &answer.rows {
        match row.iter().map(Value::int).collect::<Vec<_>>()[..] {
            [Some(number), Some(count), Some(least), Some(most), Some(sum)] => {
                match shown(number, count, [least, most, sum]) {
                    None => whole.push(number),
                    Some(rows) => drop(odd.insert(number.into(), rows)),
                }
            }
            _ => foreign = Some(row.as_slice()),
        }
    }
    whole.sort_unstable();
    (whole, odd, foreign)
}

/// How many rows of an append there are, or that they are others; `None`: just its own.
fn shown(number: i64, count: i64, figures: [i64; 3]) -> Option<i64> {
    let values = Table::values(number);
    let expected = [values[0], values[Table::PARTS - 1], values.iter().sum()];
    match (count == Table::PARTS as i64, figures == expected) {
        (true, true) => None,
        (true, false) => Some(TORN),
        (false, _) => Some(count),
    }
}

/// Counts a table's snapshots.
async fn count(
    shared: &Shared,
    table: i64,
    node: u64,
    access: &mut Access,
    scribe: &mut Scribe,
) -> Result<(), Failure> {
    let action = |count| shared.action(Hot::Snapshots { table: table.into(), count });
    let sql = format!("SELECT count(*) FROM {SCHEMA}.\"hot_{table}$snapshots\"");
    let by = access.deadline();
    scribe.invoke(action(None));
    match access.run(node, &sql, None, by).await {
        Ok(answer) => {
            let count = count_of(&answer).and_then(|count| u64::try_from(count).ok());
            scribe.ok(action(count), None, Some(node));
            Ok(())
        }
        Err(failure) => {
            scribe.query_failed(action(None), &failure, node);
            Err(failure)
        }
    }
}

struct Tables {
    shared: Arc<Shared>,
}

#[async_trait]
impl Frame for Tables {
    async fn prepare(&mut self, access: &mut Access, _scribe: &mut Scribe) -> Result<(), Error> {
        make_schema(access).await?;
        Ok(())
    }

    async fn finish(&mut self, access: &mut Access, scribe: &mut Scribe) -> Result<(), Error> {
        if self.shared.upkeep {
            make_up(&self.shared, access, scribe).await;
            tended::await_worker(&self.shared, access, scribe).await;
            tended::read_chores(&self.shared, access, scribe).await;
        }
        let purged = match self.shared.done().iter().any(|(_, what)| *what == Chore::Purge) {
            true => purged(access).await,
            false => Ok(()),
        };
        // Also without: what is gone shows here.
        read_everywhere(self, access, scribe).await?;
        Ok(purged?)
    }
}

/// Waits until a purge is done: one that was only submitted has deleted nothing yet.
async fn purged(access: &mut Access) -> Result<(), Failure> {
    let sql = "SELECT count(*) FROM system.procedures WHERE kind = 'purge_table' AND state = 'done'";
    let until = clock::now() + PURGED_WITHIN;
    loop {
        let node = access.any_node().ok_or_else(|| Failure::unreached("there is no query node"))?;
        let done = access.run(node, sql, None, access.deadline()).await;
        match done {
            Ok(answer) if count_of(&answer) > Some(0) => return Ok(()),
            done if clock::now() > until => {
                let last = done.map_or_else(|e| e.to_string(), |_| "none is done".to_owned());
                return Err(Failure::unreached(format!("no purge came to its end: {last}")));
            }
            _ => tokio::time::sleep(PAUSE).await,
        }
    }
}

#[async_trait]
impl Last for Tables {
    fn tables(&self) -> Vec<i64> {
        self.shared.used.all()
    }

    fn acknowledged(&self) -> u64 {
        self.shared.used.acknowledged()
    }

    async fn read(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        read(&self.shared, table, node, access, scribe).await
    }

    async fn list(&self, table: i64, node: u64, access: &mut Access, scribe: &mut Scribe) -> Result<(), Failure> {
        count(&self.shared, table, node, access, scribe).await
    }
}

#[cfg(test)]
mod tests {
    use super::super::statements::canned;
    use super::*;
    use crate::history::{Kind, Operation};
    use crate::run::recorder::Recorder;

    /// How a history has a chore that is answered so.
    async fn chore(what: Chore, rows: &[&[Value]]) -> Operation {
        let recorder = Recorder::new();
        let mut scribe = recorder.scribe();
        keep_up(&Shared::new(true), 1, what, 1, &mut canned::access(rows), &mut scribe).await;
        recorder.take().0.pop().unwrap()
    }

    #[tokio::test]
    async fn a_chore_that_finds_nothing_to_do_is_no_success() {
        for what in [Chore::Pack, Chore::Expire] {
            let idle = chore(what, &[&[Value::Int(0)]]).await;
            assert_eq!((idle.kind, idle.refusal.as_deref()), (Kind::Fail, Some(NOTHING_TO_DO)));
            assert_eq!(chore(what, &[&[Value::Int(2)]]).await.kind, Kind::Ok);
            assert_eq!(chore(what, &[]).await.kind, Kind::Info);
        }
        // That drops a table, which counts nothing.
        assert_eq!(chore(Chore::Purge, &[]).await.kind, Kind::Ok);
    }

    #[tokio::test]
    async fn what_no_table_has_had_is_done_in_the_end() {
        for (changed, tries) in [(2, 1), (0, TRIES)] {
            let (recorder, shared) = (Recorder::new(), Shared::new(true));
            let (mut access, mut scribe) = (canned::access(&[&[Value::Int(changed)]]), recorder.scribe());
            make_up(&shared, &mut access, &mut scribe).await;
            let history = recorder.take().0;
            let done = |what| {
                let is_it = |operation: &&Operation| matches!(operation.action, Action::Upkeep(Hot::Chore { what: of, .. }) if of == what);
                history.iter().filter(is_it).filter(|operation| operation.kind == Kind::Invoke).count()
            };
            assert_eq!((done(Chore::Pack), done(Chore::Expire), done(Chore::Purge)), (tries, tries, 0));
        }
    }

    #[test]
    fn an_append_is_whole_if_its_rows_are_there_and_no_others() {
        assert_eq!(statement(1, 5), "INSERT INTO chaos.hot_1 VALUES (5, 15), (5, 16), (5, 17)");
        assert_eq!(shown(5, 3, [15, 17, 48]), None);
        assert_eq!(shown(5, 6, [15, 17, 96]), Some(6));
        assert_eq!(shown(5, 2, [15, 16, 31]), Some(2));
        assert_eq!(shown(5, 3, [15, 18, 49]), Some(TORN));
    }
}
