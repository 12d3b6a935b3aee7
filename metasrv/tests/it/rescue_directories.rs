//! Directories of stopped peers that were made by hand: damage of every kind is found, and of several survivors the right one
//! is taken.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use lake_metasrv::directory::Contents;
use lake_metasrv::log::SkipSync;
use lake_metasrv::raft::state_machine::Applied;
use lake_metasrv::raft::types::{Command, Entry, Member, Membership, Payload, TypeConfig, Vote, log_id};
use lake_metasrv::rescue::found::NewCluster;
use lake_metasrv::rescue::reading::{self, Reading, Weight};
use lake_metasrv::rescue::{Summary, recover};
use lake_metasrv::snapshot;
use lake_metasrv::state::FEATURE_LEVEL;
use lake_metasrv::state::command::Action;
use lake_proto::kv::{Op, Txn};
use openraft::storage::IOFlushed;
use openraft::type_config::TypeConfigExt;
use rand::Rng;

use crate::support::directories::{copy, files};
use crate::support::{eventually, log_oracle};

const CLUSTER: &str = "c0ffee";

/// The founders of a cluster of three, and what is written into its log, by term and index.
fn founding() -> Entry {
    let member = |id: u64| Member { incarnation: format!("{id:032}"), ..Member::default() };
    let membership =
        Membership::new(vec![[1, 2, 3].into()], (1..=3).map(|id| (id, member(id))).collect::<BTreeMap<_, _>>())
            .unwrap();
    Entry { log_id: log_id(0, 0), payload: Payload::Membership(membership) }
}

fn key(term: u64, index: u64) -> String {
    format!("/kv/{term}/{index}")
}

fn write(term: u64, index: u64) -> Entry {
    let txn = Txn { then: vec![Op::put(key(term, index), vec![index as u8; 300])], ..Txn::default() };
    Entry { log_id: log_id(term, index), payload: Payload::Normal(Command::new(Action::Txn(txn).unstamped())) }
}

/// A peer's directory while it is made.
struct Making {
    contents: Contents,
    applied: Applied,
    dir: PathBuf,
}

impl Making {
    async fn begin(dir: PathBuf) -> Self {
        let contents = log_oracle::open(&dir, SkipSync::default()).unwrap();
        contents.log.adopt(CLUSTER.to_owned()).await.unwrap();
        let mut this = Self { contents, applied: Applied::default(), dir };
        this.append([founding()]).await;
        this
    }

    /// Makes entries durable, and applies them.
    async fn append(&mut self, entries: impl IntoIterator<Item = Entry>) {
        let entries: Vec<Entry> = entries.into_iter().collect();
        for entry in &entries {
            self.applied.apply(entry.clone(), FEATURE_LEVEL).unwrap();
        }
        let (sender, done) = TypeConfig::oneshot();
        self.contents.log.append(entries, IOFlushed::signal(sender)).await.unwrap();
        done.await.unwrap().unwrap();
    }

    async fn snapshot(&self, purge: bool) {
        let store = self.contents.state_machine.snapshots();
        store.write(&self.applied.snapshot_meta(), CLUSTER, &self.applied.state).unwrap();
        let last = self.applied.last.unwrap();
        self.contents.log.note_snapshot(last).await.unwrap();
        if purge {
            self.contents.log.purge(last).await.unwrap();
        }
    }

    async fn vote(&self, term: u64) {
        self.contents.log.save_vote(Vote::new(term, 1)).await.unwrap();
    }

    async fn end(self) -> PathBuf {
        self.contents.log.close().await;
        self.dir
    }
}

/// Two snapshots, entries before, between and behind them.
async fn lived(dir: PathBuf) -> PathBuf {
    let mut making = Making::begin(dir).await;
    making.append((1..=20).map(|index| write(1, index))).await;
    making.snapshot(true).await;
    making.append((21..=40).map(|index| write(1, index))).await;
    making.snapshot(false).await;
    making.append((41..=60).map(|index| write(2, index))).await;
    making.vote(3).await;
    making.end().await
}

async fn read(dir: &Path) -> Reading {
    reading::read(dir, BTreeSet::new()).await.unwrap()
}

fn keys(applied: &Applied) -> BTreeSet<String> {
    applied.state.iter().map(|entry| entry.key).collect()
}

fn flip(file: &Path, at: usize) {
    let mut bytes = std::fs::read(file).unwrap();
    bytes[at] ^= 1 << rand::rng().random_range(0..8);
    std::fs::write(file, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undamaged_directory_has_nothing_to_find() {
    let scratch = tempfile::tempdir().unwrap();
    let reading = read(&lived(scratch.path().join("peer")).await).await;
    assert_eq!(reading.findings, []);
    assert!(reading.is_whole());
    let log = reading.log.unwrap();
    assert_eq!((log.purged, log.last, log.entries), (Some(log_id(1, 20)), Some(log_id(2, 60)), 40));
    assert_eq!(reading.snapshots.iter().map(|s| s.covers.index).collect::<Vec<_>>(), [40, 20]);
    assert_eq!(reading.committed_index(), Some(40));
    assert_eq!(reading.committed.as_ref().unwrap().last, Some(log_id(1, 40)));
    assert_eq!(keys(reading.committed.as_ref().unwrap()).len(), 40);
    assert_eq!(keys(reading.replayed.as_ref().unwrap()).len(), 60);
    assert_eq!(reading.vote().unwrap().leader_id.term, 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn flipped_bits_are_found_or_change_nothing() {
    let scratch = tempfile::tempdir().unwrap();
    let healthy = lived(scratch.path().join("healthy")).await;
    let whole = Summary::from(read(&healthy).await.replayed.as_ref().unwrap());
    let mut outcomes: BTreeMap<(String, bool), u32> = BTreeMap::new();
    for trial in 0..40 {
        let dir = scratch.path().join(format!("trial-{trial}"));
        copy(&healthy, &dir);
        let files: Vec<PathBuf> = files(&dir).into_iter().filter(|file| file.file_name().unwrap() != "lock").collect();
        let file = files[trial % files.len()].clone();
        let bytes = std::fs::read(&file).unwrap();
        // Mostly where something is written.
        let written: Vec<usize> = (0..bytes.len()).filter(|at| bytes[*at] != 0).collect();
        if written.is_empty() {
            continue;
        }
        let at = written[rand::random_range(0..written.len())];
        flip(&file, at);
        let reading = read(&dir).await;
        let name = file.strip_prefix(&dir).unwrap().display().to_string();
        let found = reading.is_damaged();
        if found {
            let of_log = file.parent().is_some_and(|parent| parent.ends_with("log"));
            let place = if of_log { dir.join("log") } else { file.clone() };
            let named =
                reading.findings.iter().any(|f| f.file == place || f.what.contains(&place.display().to_string()));
            assert!(named, "{name} at {at}: {:?}", reading.findings);
            let copied = std::env::temp_dir().join("lake-log-").display().to_string();
            assert!(!format!("{:?}", reading.findings).contains(&copied), "{:?}", reading.findings);
        } else {
            assert_eq!(reading.replayed.as_ref().map(Summary::from), Some(whole.clone()), "{name} at {at}");
        }
        // Whatever is given is a state that there was.
        if let Some(given) = &reading.replayed {
            let last = given.last.unwrap().index;
            let expected: BTreeSet<String> = (1..=last).map(|n| key(if n <= 40 { 1 } else { 2 }, n)).collect();
            assert_eq!(keys(given), expected, "{name} at {at}");
        }
        if name == "mark" || name.ends_with(".snap") {
            assert!(found, "{name} at {at}");
        }
        *outcomes.entry((name.split('.').next().unwrap().to_owned(), found)).or_default() += 1;
        std::fs::remove_dir_all(&dir).unwrap();
    }
    println!("(file, found): {outcomes:#?}");
    assert!(outcomes.iter().any(|((name, found), _)| name.starts_with("log") && *found), "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_kind_of_damage_is_named_with_its_place() {
    let scratch = tempfile::tempdir().unwrap();
    let healthy = lived(scratch.path().join("healthy")).await;
    let damaged = |name: &str, damage: &dyn Fn(&Path)| {
        let dir = scratch.path().join(name);
        copy(&healthy, &dir);
        damage(&dir);
        dir
    };
    let snapshots = |dir: &Path| {
        let mut all: Vec<PathBuf> = files(&dir.join("snapshots"));
        all.sort();
        all
    };
    let said = async |dir: &Path| {
        let reading = read(dir).await;
        let said: Vec<String> = reading.findings.iter().map(|f| format!("{}: {}", f.file.display(), f.what)).collect();
        (reading, said.join("\n"))
    };

    let dir = damaged("slot", &|dir| flip(&dir.join("mark"), 4096 + 17));
    let (reading, text) = said(&dir).await;
    assert!(reading.is_damaged() && reading.is_whole(), "the other slot counts");
    assert!(text.contains("mark: slot 1 (bytes 4096 to 8191) does not read"), "{text}");

    let dir = damaged("mark", &|dir| std::fs::write(dir.join("mark"), [0; 8192]).unwrap());
    let (reading, text) = said(&dir).await;
    assert!(text.contains("neither slot reads") && reading.mark.is_none(), "{text}");
    assert_eq!(reading.replayed.as_ref().unwrap().last, Some(log_id(1, 40)), "the newest snapshot is left");

    let dir = damaged("newest", &|dir| flip(&snapshots(dir)[1], 500));
    let (reading, text) = said(&dir).await;
    assert!(text.contains(&snapshots(&dir)[1].display().to_string()), "{text}");
    assert!(reading.is_whole(), "the older one and the log give all of it");
    assert_eq!(reading.committed.as_ref().unwrap().last, Some(log_id(1, 40)), "the mark notes what it covered");

    let dir = damaged("both", &|dir| snapshots(dir).iter().for_each(|file| flip(file, 500)));
    let (reading, text) = said(&dir).await;
    assert!(text.contains("no snapshot that reaches entry 20") && !reading.is_whole(), "{text}");
    assert!(reading.replayed.is_none() && reading.committed.is_none());

    let dir = damaged("gone", &|dir| std::fs::remove_file(&snapshots(dir)[1]).unwrap());
    let (_, text) = said(&dir).await;
    assert!(text.contains("the mark notes a newer snapshot"), "{text}");

    // A snapshot that reads, and is of another history.
    let dir = damaged("wrong", &|dir| {
        let loaded = snapshot::read(&snapshots(dir)[1], lake_metasrv::state::FEATURE_LEVEL).unwrap();
        let mut state = loaded.state;
        state.set_members([(9, "somebody")]);
        std::fs::remove_file(&snapshots(dir)[1]).unwrap();
        let store = snapshot::SnapshotStore::open(dir.join("snapshots")).unwrap();
        store.write(&loaded.meta, CLUSTER, &state).unwrap();
    });
    let (reading, text) = said(&dir).await;
    drop(reading);
    assert!(text.contains("its state is not what the log gives"), "{text}");
    assert!(!read(&dir).await.is_whole(), "one of the two is wrong, and nobody can tell which");

    // What a crash leaves is no damage.
    let dir = damaged("left", &|dir| std::fs::write(dir.join("snapshots/receiving-1.tmp"), b"half").unwrap());
    let reading = read(&dir).await;
    assert_eq!(reading.findings.iter().map(|f| f.weight).collect::<Vec<_>>(), [Weight::Remark]);
    assert!(dir.join("snapshots/receiving-1.tmp").exists(), "nothing is removed");

    // A file that somebody put aside is no snapshot, and is not passed over in silence.
    let dir = damaged("aside", &|dir| {
        let newest = &snapshots(dir)[1];
        std::fs::copy(newest, newest.with_file_name("before-the-move.snap")).unwrap();
    });
    let (reading, text) = said(&dir).await;
    assert!(!reading.is_damaged() && text.contains("before-the-move.snap: it has no snapshot's name"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_that_reaches_further_than_the_log_counts() {
    let scratch = tempfile::tempdir().unwrap();
    // A peer that was stopped after it had received a snapshot, and before it let go of its log: of that, entries 21 to 30
    // were never committed.
    let mut making = Making::begin(scratch.path().join("received")).await;
    making.append((1..=20).map(|index| write(1, index))).await;
    making.snapshot(true).await;
    let before = making.applied.clone();
    making.append((21..=30).map(|index| write(2, index))).await;
    making.applied = before;
    for index in 21..=40 {
        making.applied.apply(write(5, index), FEATURE_LEVEL).unwrap();
    }
    making.snapshot(false).await;
    let received = making.end().await;
    let reading = read(&received).await;
    assert_eq!(reading.findings, [], "it is as such a crash leaves it");
    assert!(reading.is_whole());
    let expected: BTreeSet<String> = (1..=20).map(|n| key(1, n)).chain((21..=40).map(|n| key(5, n))).collect();
    for applied in [&reading.committed, &reading.replayed] {
        let applied = applied.as_ref().unwrap();
        assert_eq!((applied.last, keys(applied)), (Some(log_id(5, 40)), expected.clone()));
    }
    drop(reading);
    let plan = recover::plan(std::slice::from_ref(&received)).await.unwrap();
    assert_eq!(carried_out(&plan, &scratch.path().join("new")).await.1, expected);
    drop(plan);

    // A log of which nothing reads: the newest snapshot counts, not the one with which the log would begin.
    let damaged = lived(scratch.path().join("damaged")).await;
    std::fs::write(damaged.join("log/db"), b"").unwrap();
    let reading = read(&damaged).await;
    assert!(reading.is_damaged() && !reading.is_whole());
    assert_eq!(reading.replayed.as_ref().unwrap().last, Some(log_id(1, 40)));
    drop(reading);
    let plan = recover::plan(std::slice::from_ref(&damaged)).await.unwrap();
    assert_eq!((plan.taken().last, plan.taken().committed), (Some(log_id(1, 40)), Some(40)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_torn_end_is_told_and_is_no_damage() {
    let scratch = tempfile::tempdir().unwrap();
    let torn = lived(scratch.path().join("torn")).await;
    // Half an entry behind the last one, as a crash can leave it in sled.
    {
        // A process that another test is starting may have the lock for a moment still: until it runs, it has what this one had open.
        let config = sled::Config::new().path(torn.join("log")).segment_size(8 << 20);
        let log = eventually("the log to be free", async || config.open().ok()).await;
        log.open_tree("log").unwrap().insert(61u64.to_be_bytes(), &[1, 0, 0, 1, 0, 7, 7]).unwrap();
        log.flush().unwrap();
    }
    let reading = read(&torn).await;
    let [finding] = &reading.findings[..] else { panic!("{:?}", reading.findings) };
    assert_eq!((finding.weight, &finding.file), (Weight::Remark, &torn.join("log")));
    assert!(finding.what.contains("its end is torn from entry 61 on"), "{finding:?}");
    assert!(finding.what.contains("cuts that off, which loses nothing"), "{finding:?}");
    assert!(!reading.is_damaged() && reading.is_whole());
    assert_eq!(reading.replayed.as_ref().unwrap().last, Some(log_id(2, 60)));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_only_a_newer_build_knows_is_neither_damaged_nor_left_out() {
    let scratch = tempfile::tempdir().unwrap();
    let mut making = Making::begin(scratch.path().join("newer")).await;
    making.append((1..=5).map(|index| write(1, index))).await;
    let raised = Action::SetFeatureLevel { level: FEATURE_LEVEL + 1, term: 1 };
    let raised = Entry { log_id: log_id(1, 6), payload: Payload::Normal(Command::new(raised.unstamped())) };
    let (sender, done) = TypeConfig::oneshot();
    making.contents.log.append(vec![raised], IOFlushed::signal(sender)).await.unwrap();
    done.await.unwrap().unwrap();
    let dir = making.end().await;
    for error in [
        reading::read(&dir, BTreeSet::new()).await.unwrap_err(),
        recover::plan(std::slice::from_ref(&dir)).await.unwrap_err(),
    ] {
        let text = error.to_string();
        assert!(matches!(error, lake_metasrv::Error::Newer(_)), "{text}");
        assert!(text.contains("start this peer with the build") && !text.contains("lake-log-"), "{text}");
    }
}

/// Where the records of a journal are, by their number: one place in each half.
fn journal_records(file: &Path) -> BTreeMap<u64, Vec<usize>> {
    let bytes = std::fs::read(file).unwrap();
    let mut found: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    // The divider begins like a record, and its rest is filled.
    let records = (0..bytes.len()).step_by(4096).filter(|at| bytes[*at..].starts_with(b"lakejrnl"));
    for at in records.filter(|at| bytes[at + 4095] != 0xa5) {
        let sequence = u64::from_be_bytes(bytes[at + 16..at + 24].try_into().unwrap());
        found.entry(sequence).or_default().push(at);
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn damage_to_the_journal_is_told_and_what_is_before_it_counts() {
    let scratch = tempfile::tempdir().unwrap();
    let mut making = Making::begin(scratch.path().join("running")).await;
    making.append((1..=10).map(|index| write(1, index))).await;
    making.snapshot(false).await;
    making.append([write(1, 11)]).await;
    making.append([write(1, 12)]).await;
    // As a process that is killed leaves it: nothing is under way, and the last entries are nowhere but in the journal for sure.
    let killed = scratch.path().join("killed");
    copy(&making.dir, &killed);
    making.end().await;
    let reading = read(&killed).await;
    assert_eq!(reading.findings, []);
    assert!(reading.is_whole());
    assert_eq!(reading.replayed.as_ref().unwrap().last, Some(log_id(1, 12)));
    drop(reading);

    let journal = killed.join("journal");
    let records = journal_records(&journal);
    // The newest in one half only: what a crash between the two writes leaves.
    let whole = std::fs::read(&journal).unwrap();
    flip(&journal, records.last_key_value().unwrap().1[1] + 50);
    let reading = read(&killed).await;
    let [finding] = &reading.findings[..] else { panic!("{:?}", reading.findings) };
    assert!(finding.weight == Weight::Remark && finding.what.contains("its end is torn"), "{finding:?}");
    assert_eq!(reading.replayed.as_ref().unwrap().last, Some(log_id(1, 12)), "it counts all the same");
    drop(reading);
    // In neither: it is cut off.
    flip(&journal, records.last_key_value().unwrap().1[0] + 50);
    let reading = read(&killed).await;
    let [finding] = &reading.findings[..] else { panic!("{:?}", reading.findings) };
    assert!(finding.weight == Weight::Remark && finding.what.contains("its end is torn"), "{finding:?}");
    drop(reading);
    std::fs::write(&journal, whole).unwrap();

    let (_, places) = records.iter().rev().nth(1).unwrap();
    assert_eq!(places.len(), 2, "{records:?}");
    flip(&journal, places[0] + 50);
    let reading = read(&killed).await;
    assert!(reading.is_damaged() && reading.is_whole(), "{:?}", reading.findings);
    let [finding] = &reading.findings[..] else { panic!("{:?}", reading.findings) };
    assert!(finding.file == journal && finding.what.contains("only one of its halves: 1"), "{finding:?}");
    drop(reading);

    flip(&journal, places[1] + 60);
    let reading = read(&killed).await;
    assert!(reading.is_damaged() && !reading.is_whole());
    let [finding] = &reading.findings[..] else { panic!("{:?}", reading.findings) };
    assert!(finding.file == journal && finding.what.contains("not readable in either half"), "{finding:?}");
    let given = reading.replayed.as_ref().unwrap();
    assert!(given.last >= Some(log_id(1, 10)), "{:?}", given.last);
    assert_eq!(keys(given), (1..=given.last.unwrap().index).map(|n| key(1, n)).collect());
    assert_eq!(reading.committed.as_ref().unwrap().last, Some(log_id(1, 10)));
}

/// A survivor with these entries behind the founding, by term and index, and a vote.
async fn survivor(
    dir: PathBuf,
    entries: &[(u64, std::ops::RangeInclusive<u64>)],
    snapshot_at: u64,
    vote: u64,
) -> PathBuf {
    let mut making = Making::begin(dir).await;
    for (term, range) in entries {
        for index in range.clone() {
            making.append([write(*term, index)]).await;
            if index == snapshot_at {
                making.snapshot(false).await;
            }
        }
    }
    making.vote(vote).await;
    making.end().await
}

async fn carried_out(plan: &recover::Plan, out: &Path) -> (NewCluster, BTreeSet<String>) {
    let made = plan.carry_out(out, 4).await.unwrap();
    let reading = read(out).await;
    assert_eq!(reading.findings, []);
    assert_eq!(Summary::from(reading.replayed.as_ref().unwrap()), made.state);
    let keys = keys(reading.replayed.as_ref().unwrap());
    (made, keys)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_higher_term_is_taken_though_its_log_is_shorter() {
    let scratch = tempfile::tempdir().unwrap();
    let long = survivor(scratch.path().join("long"), &[(1, 1..=9)], 3, 1).await;
    let high = survivor(scratch.path().join("high"), &[(1, 1..=4), (2, 5..=6)], 4, 5).await;
    let plan = recover::plan(&[long.clone(), high.clone()]).await.unwrap();
    assert_eq!(plan.taken().dir, high);
    assert_eq!(plan.taken().last, Some(log_id(2, 6)));
    let warned = plan.warnings().join("\n");
    assert!(warned.contains("election of term 5") && warned.contains("entries 5 to 6 may never"), "{warned}");
    let (made, keys) = carried_out(&plan, &scratch.path().join("new")).await;
    let expected: BTreeSet<String> = (1..=4).map(|n| key(1, n)).chain((5..=6).map(|n| key(2, n))).collect();
    assert_eq!(keys, expected);
    assert_eq!((made.peer_id, made.state.last), (4, Some(log_id(2, 6))));
    assert_eq!(read(&made.dir).await.vote().unwrap().leader_id.term, 5, "no term is used twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_survivor_counts_with_what_can_be_proven() {
    let scratch = tempfile::tempdir().unwrap();
    let healthy = survivor(scratch.path().join("healthy"), &[(1, 1..=9)], 5, 1).await;
    let damaged = survivor(scratch.path().join("damaged"), &[(1, 1..=40)], 30, 1).await;
    // All that the log held is gone; the snapshot is left.
    std::fs::write(damaged.join("log/db"), b"").unwrap();
    let plan = recover::plan(&[healthy.clone(), damaged.clone()]).await.unwrap();
    assert_eq!((plan.taken().dir.clone(), plan.taken().last), (damaged.clone(), Some(log_id(1, 30))));
    let warned = plan.warnings().join("\n");
    assert!(
        warned.contains("is damaged: it had acknowledged index 40 of term 1 or more, and only index 30"),
        "{warned}"
    );
    let (_, keys) = carried_out(&plan, &scratch.path().join("new")).await;
    assert_eq!(keys.len(), 30);

    // Without its snapshot it proves nothing: the other one is taken, and this is told.
    for file in files(&damaged.join("snapshots")) {
        std::fs::remove_file(file).unwrap();
    }
    drop(plan);
    let error = recover::plan(&[healthy.clone(), damaged.clone()]).await.unwrap_err().to_string();
    assert!(error.contains("up to index 30 are committed") && error.contains("Leave out"), "{error}");
    let plan = recover::plan(std::slice::from_ref(&healthy)).await.unwrap();
    assert_eq!(plan.taken().last, Some(log_id(1, 9)));
    let nothing = recover::plan(std::slice::from_ref(&damaged)).await.unwrap_err().to_string();
    assert!(nothing.contains("no state can be put together"), "{nothing}");
}

#[tokio::test(flavor = "multi_thread")]
async fn directories_that_do_not_belong_together_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let one = survivor(scratch.path().join("one"), &[(1, 1..=9)], 5, 1).await;
    let error = recover::plan(&[one.clone(), scratch.path().join("./one")]).await.unwrap_err().to_string();
    assert!(error.contains("is given twice"), "{error}");
    let twin = scratch.path().join("twin");
    copy(&one, &twin);
    let error = recover::plan(&[one.clone(), twin]).await.unwrap_err().to_string();
    assert!(error.contains("the same peer"), "{error}");
    let fresh = scratch.path().join("fresh");
    log_oracle::open(&fresh, SkipSync::default()).unwrap().log.close().await;
    let error = recover::plan(&[one.clone(), fresh]).await.unwrap_err().to_string();
    assert!(error.contains("belongs to no cluster"), "{error}");
    // Another history under the same cluster id: what one knows as committed the other has differently.
    let mut other = Making::begin(scratch.path().join("other")).await;
    other
        .append(
            (1..=5).map(|index| write(1, index + 100)).map(|e| Entry { log_id: log_id(1, e.log_id.index - 100), ..e }),
        )
        .await;
    other.snapshot(false).await;
    other.append((6..=12).map(|index| write(1, index))).await;
    let other = other.end().await;
    let error = recover::plan(&[one.clone(), other]).await.unwrap_err().to_string();
    assert!(error.contains("at index 5") && error.contains("another state"), "{error}");

    let plan = recover::plan(std::slice::from_ref(&one)).await.unwrap();
    let error = plan.carry_out(&one, 4).await.unwrap_err().to_string();
    assert!(error.contains("exists already"), "{error}");
    let error = plan.carry_out(&scratch.path().join("new"), 0).await.unwrap_err().to_string();
    assert!(error.contains("above 0"), "{error}");
    let left: Vec<String> =
        std::fs::read_dir(scratch.path()).unwrap().map(|e| e.unwrap().file_name().display().to_string()).collect();
    assert!(!left.iter().any(|name| name.contains("building")), "{left:?}");
}
