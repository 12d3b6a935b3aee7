//! A peer's directory put through everything a log can be asked for, and what must be found in it afterwards.

// Two binaries share it, and each needs a part.
#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use lake_metasrv::config::StorageConfig;
use lake_metasrv::directory::{self, Contents, DirectoryOptions};
use lake_metasrv::files::FreeSpace;
use lake_metasrv::log::{Log, SkipSync};
use lake_metasrv::raft::types::{
    Command as LogCommand, Entry, Payload, SnapshotMeta, StoredMembership, TypeConfig, Vote, log_id,
};
use lake_metasrv::snapshot::{Encoder, SnapshotData};
use lake_metasrv::state::command::{Action, Command};
use lake_metasrv::state::{FEATURE_LEVEL, State};
use lake_proto::coordination::{ScopeOwner, Stamp};
use lake_proto::kv::{Compare, Op, Txn};
use openraft::storage::IOFlushed;
use openraft::type_config::TypeConfigExt;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

// ---- what is told -------------------------------------------------------------------------------------------------

/// What a worker was told is done, and what it is about to take back.
#[derive(Debug, Clone, Default)]
pub struct Told {
    pub incarnation: Option<String>,
    pub adopted: bool,
    pub term: u64,
    /// The term of each entry that must be there, or in the state, from 0 on.
    pub entries: BTreeMap<u64, u64>,
    /// Of those that a snapshot has which is being received: they may be in the state.
    pub receiving: BTreeMap<u64, u64>,
    pub purged: Option<u64>,
    pub purging: Option<u64>,
    pub snapshot: Option<u64>,
    /// The revision of each key that was written to a whole peer.
    pub keys: BTreeMap<String, u64>,
}

impl std::fmt::Display for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} entries, {} keys, vote {}, snapshot {:?}, purge {:?}",
            self.entries.len(),
            self.keys.len(),
            self.term,
            self.snapshot,
            self.purged
        )
    }
}

impl Told {
    pub fn hear(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        let number = |n: usize| words[n].parse::<u64>().unwrap();
        match words[0] {
            "created" => self.incarnation = Some(words[1].to_owned()),
            "adopted" => self.adopted = true,
            "vote" => self.term = number(1),
            "entries" => self.entries.extend((number(2)..=number(3)).map(|index| (index, number(1)))),
            "truncating" => drop(self.entries.split_off(&number(1))),
            "receiving" => self.receiving = (number(2)..=number(3)).map(|index| (index, number(1))).collect(),
            "received" => {
                let behind = self.receiving.split_off(&(number(1) + 1));
                for (index, term) in std::mem::replace(&mut self.receiving, behind) {
                    self.entries.entry(index).or_insert(term);
                }
            }
            "snapshot" => self.snapshot = Some(number(1)),
            "purging" => self.purging = Some(number(1)),
            "purged" => self.purged = Some(number(1)),
            "key" => drop(self.keys.insert(words[1].to_owned(), number(2))),
            other => panic!("the worker said {other}"),
        }
    }
}

// ---- the worker ----------------------------------------------------------------------------------------------------

pub fn open(dir: &Path, skip_sync: SkipSync) -> Result<Contents, lake_metasrv::Error> {
    // Small, so that it is full often.
    let storage = StorageConfig { disk_reserve_bytes: 0, journal_bytes: 256 << 10, ..StorageConfig::default() };
    std::fs::create_dir_all(dir).unwrap();
    let options = DirectoryOptions {
        peer_id: Some(1),
        storage,
        free_space: FreeSpace::default(),
        feature_level: FEATURE_LEVEL,
        skip_sync,
    };
    directory::open(dir, options)
}

/// The entry that stands at an index in a term: what it holds follows from these two. All kinds of commands occur; leases
/// and sessions are guessed, and often right.
pub fn entry(term: u64, index: u64) -> Entry {
    let mut rng = StdRng::seed_from_u64(term << 32 ^ index);
    let len = match rng.random_range(0..100) {
        0..60 => rng.random_range(0..300),
        60..97 => rng.random_range(300..6_000),
        _ => rng.random_range(6_000..120_000),
    };
    let mut value = vec![0; len];
    rng.fill(&mut value[..]);
    let key = format!("/kv/{}", index % 40);
    let mut recent = || rng.random_range(index.saturating_sub(12)..=index) + 1;
    let (one, other, session) = (recent(), recent(), recent());
    let owner = ScopeOwner::Procedure(format!("procedure {}", index % 3));
    let path = format!("/scope/{}", index % 7);
    let txn =
        |when, then| Action::Txn(Txn { when, then, otherwise: vec![Op::List { prefix: "/kv/1".into(), limit: 5 }] });
    let action = match rng.random_range(0..100) {
        0..50 => txn(vec![], vec![Op::put(key, value)]),
        50..58 => txn(vec![], vec![Op::delete(format!("/kv/{}", one % 40)), Op::put(key, value)]),
        58..66 => txn(vec![Compare::lease_alive(one)], vec![Op::put_leased(key, value, one)]),
        66..76 => Action::GrantLease { ttl_ms: 5_000, holder: format!("node {}", index % 5) },
        76..80 => Action::ExpireLeases { leases: vec![one, other], term },
        80..88 => Action::OpenSession { ttl_ms: 60_000, holder: "a client".to_owned() },
        88..90 => Action::CloseSession { session: one },
        90..94 => {
            txn(vec![Compare::scope_free(path.clone(), Some(owner.clone()))], vec![Op::AcquireScope { path, owner }])
        }
        94..97 => txn(vec![], vec![Op::ReleaseScope { path, owner }]),
        _ => Action::SetQuota { prefix: "/kv/3".to_owned(), bytes: Some(1 << 20) },
    };
    let sequence = rng.random_range(1..4);
    let stamp = rng.random_ratio(1, 2).then_some(Stamp { session, sequence, lowest_unanswered: 1 });
    let command = Command { stamp, proposed_unix_ms: 1_700_000_000_000 + index, action };
    Entry { log_id: log_id(term, index), payload: Payload::Normal(LogCommand::new(command)) }
}

pub fn apply(state: &mut State, entry: &Entry) {
    if let Payload::Normal(command) = &entry.payload {
        state.apply(entry.log_id.leader_id.term, command.command().unwrap());
    }
}

/// Goes through everything a log can be asked for, in random order.
pub struct LogWorker {
    contents: Contents,
    dir: PathBuf,
    skip: SkipSync,
    rng: StdRng,
    term: u64,
    /// The term of each entry that the log holds.
    terms: BTreeMap<u64, u64>,
    state: State,
    /// How many entries the state has applied.
    applied: u64,
    snapshot: Option<u64>,
    tell: Tell,
}

/// Hears each line that a worker tells, for [`Told::hear`].
pub type Tell = Box<dyn FnMut(&str) + Send>;

impl LogWorker {
    /// Opens, or makes, the directory.
    pub async fn start(dir: PathBuf, seed: u64, skip: SkipSync, tell: Tell) -> Self {
        let contents = open(&dir, skip).expect("opening");
        let mark = contents.log.mark();
        let mut this = Self {
            rng: StdRng::seed_from_u64(seed),
            contents,
            dir,
            skip,
            term: mark.vote.map_or(1, |vote| vote.leader_id.term + 1),
            terms: BTreeMap::new(),
            state: State::default(),
            applied: 0,
            snapshot: None,
            tell,
        };
        this.tell(format!("created {}", mark.incarnation));
        if mark.cluster_id.is_empty() {
            this.log().adopt("power".to_owned()).await.unwrap();
        }
        this.tell("adopted".to_owned());
        this.recover().await;
        this
    }

    /// Does something.
    pub async fn step(&mut self) {
        match self.rng.random_range(0..100) {
            0..50 => self.append().await,
            50..60 => self.vote().await,
            60..72 => self.truncate().await,
            72..84 => self.snapshot().await,
            84..93 => self.purge().await,
            93..96 => self.receive().await,
            _ => self.reopen().await,
        }
    }

    /// Does something that syncs nothing but the log and the mark: a snapshot makes the file system write down everything.
    pub async fn step_in_the_log(&mut self) {
        match self.rng.random_range(0..10) {
            0..8 => self.append().await,
            8 => self.vote().await,
            _ => self.truncate().await,
        }
    }

    /// Leaves something of everything: two snapshots, and entries behind the newer; the log is purged up to that, or some
    /// way before it.
    pub async fn settle(&mut self, purge_all: bool) {
        for _ in 0..2 {
            self.append().await;
            self.snapshot().await;
        }
        if let Some(upto) = self.snapshot.filter(|_| purge_all) {
            self.purge_upto(upto).await;
        }
        self.append().await;
        self.vote().await;
    }

    pub async fn stop(self) {
        self.log().close().await;
    }

    fn tell(&mut self, what: String) {
        (self.tell)(&what);
    }

    fn log(&self) -> Log {
        self.contents.log.clone()
    }

    fn next(&self) -> u64 {
        self.terms.last_key_value().map_or(self.applied, |(index, _)| index + 1)
    }

    /// Takes over what the directory holds.
    async fn recover(&mut self) {
        let published = self.contents.state_machine.published().current();
        self.state = published.state.clone();
        self.applied = published.last.map_or(0, |id| id.index + 1);
        self.snapshot = published.last.map(|id| id.index);
        if let Some(last) = published.last.filter(|last| Some(*last) > self.log().bounds().1) {
            // As openraft does it where a snapshot was received and the log not taken up to it yet.
            self.tell(format!("purging {}", last.index));
            self.log().purge(last).await.unwrap();
        }
        let entries = self.log().read(.., usize::MAX).await.unwrap();
        self.terms = entries.iter().map(|e| (e.log_id.index, e.log_id.leader_id.term)).collect();
        self.tell(format!("truncating {}", self.next()));
        if let Some(index) = self.snapshot {
            self.tell(format!("received {index}"));
        }
        for (index, term) in self.terms.clone() {
            self.tell(format!("entries {term} {index} {index}"));
        }
        let known = published.last.map(|id| id.leader_id.term).max(self.terms.values().next_back().copied());
        self.term = self.term.max(known.map_or(0, |term| term + 1));
    }

    async fn append(&mut self) {
        let mut waiting = Vec::new();
        for _ in 0..self.rng.random_range(1..=3) {
            let (first, count) = (self.next(), self.rng.random_range(1..=12));
            let entries: Vec<Entry> = (first..first + count).map(|index| entry(self.term, index)).collect();
            self.terms.extend((first..first + count).map(|index| (index, self.term)));
            let (sender, receiver) = TypeConfig::oneshot();
            self.log().append(entries, IOFlushed::signal(sender)).await.unwrap();
            waiting.push((first, first + count - 1, receiver));
        }
        for (first, last, receiver) in waiting {
            receiver.await.unwrap().unwrap();
            self.tell(format!("entries {} {first} {last}", self.term));
        }
    }

    async fn vote(&mut self) {
        self.term += 1;
        self.log().save_vote(Vote::new(self.term, 1)).await.unwrap();
        self.tell(format!("vote {}", self.term));
    }

    async fn truncate(&mut self) {
        let keep = self.rng.random_range(self.applied..=self.next());
        let last = keep.checked_sub(1).map(|index| (index, self.terms.get(&index)));
        let last = match last {
            Some((index, Some(term))) => Some(log_id(*term, index)),
            // Purged: openraft does not truncate into that.
            Some((_, None)) => return,
            None => None,
        };
        self.tell(format!("truncating {keep}"));
        self.log().truncate_after(last).await.unwrap();
        self.terms.split_off(&keep);
        self.vote().await;
    }

    /// As the state machine does it.
    async fn snapshot(&mut self) {
        let upto = self.rng.random_range(self.applied..=self.next());
        for index in self.applied..upto {
            apply(&mut self.state, &entry(self.terms[&index], index));
        }
        self.applied = upto;
        let Some(index) = upto.checked_sub(1).filter(|index| self.terms.contains_key(index)) else { return };
        let last = log_id(self.terms[&index], index);
        let meta = SnapshotMeta { last_log_id: Some(last), last_membership: StoredMembership::default() };
        let store = self.contents.state_machine.snapshots();
        store.write(&meta, "power", &self.state).unwrap();
        self.log().note_snapshot(last).await.unwrap();
        store.prune().unwrap();
        self.snapshot = Some(index);
        self.tell(format!("snapshot {index}"));
    }

    /// A leader's snapshot, of what this log does not have: as the service and the state machine take it in, and as openraft
    /// then takes the log up to it.
    async fn receive(&mut self) {
        let (from, upto) = (self.next(), self.next() + self.rng.random_range(1..=8));
        self.tell(format!("receiving {} {from} {}", self.term, upto - 1));
        for index in self.applied..upto {
            apply(&mut self.state, &entry(*self.terms.get(&index).unwrap_or(&self.term), index));
        }
        self.applied = upto;
        let last = log_id(self.term, upto - 1);
        let meta = SnapshotMeta { last_log_id: Some(last), last_membership: StoredMembership::default() };
        let (mut encoder, mut bytes) = (Encoder::new(&meta, "power", &self.state), Vec::new());
        while encoder.next_into(&mut bytes).unwrap() {}
        drop(encoder);
        let store = self.contents.state_machine.snapshots();
        let path = store.temporary("receiving");
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&bytes).and_then(|()| file.sync_all()).unwrap();
        store.adopt(&meta, &SnapshotData { path }).unwrap();
        self.log().note_snapshot(last).await.unwrap();
        store.prune().unwrap();
        self.snapshot = Some(upto - 1);
        self.tell(format!("snapshot {}", upto - 1));
        self.tell(format!("purging {}", upto - 1));
        self.log().purge(last).await.unwrap();
        self.terms.clear();
        self.tell(format!("received {}", upto - 1));
        self.tell(format!("purged {}", upto - 1));
    }

    async fn purge(&mut self) {
        let (Some(upto), Some((first, _))) = (self.snapshot, self.terms.first_key_value()) else { return };
        if *first > upto {
            return;
        }
        let upto = self.rng.random_range(*first..=upto);
        self.purge_upto(upto).await;
    }

    async fn purge_upto(&mut self, upto: u64) {
        if !self.terms.contains_key(&upto) {
            return;
        }
        self.tell(format!("purging {upto}"));
        self.log().purge(log_id(self.terms[&upto], upto)).await.unwrap();
        self.tell(format!("purged {upto}"));
        self.terms = self.terms.split_off(&(upto + 1));
    }

    async fn reopen(&mut self) {
        self.log().close().await;
        let (dir, skip) = (self.dir.clone(), self.skip);
        self.contents = open(&dir, skip).expect("opening again");
        self.recover().await;
    }
}

// ---- what must be there -------------------------------------------------------------------------------------------

pub async fn check_contents(contents: &Contents, told: &Told) -> Result<(), String> {
    let mark = contents.log.mark();
    if told.incarnation.as_ref().is_some_and(|told| *told != mark.incarnation) {
        return Err("the directory was made anew".to_owned());
    }
    if told.adopted && mark.cluster_id != "power" {
        return Err("the directory has forgotten its cluster".to_owned());
    }
    if mark.vote.map_or(0, |vote| vote.leader_id.term) < told.term {
        return Err(format!("the vote went back: {:?}, told {}", mark.vote, told.term));
    }
    let (purged, last) = contents.log.bounds();
    let purged = purged.map(|id| id.index);
    if purged < told.purged || purged > told.purging.max(told.purged) {
        return Err(format!("purged up to {purged:?}, told {:?} and {:?}", told.purged, told.purging));
    }
    let entries = contents.log.read(.., usize::MAX).await.map_err(|e| e.to_string())?;
    let mut next = purged.map_or(0, |index| index + 1);
    let mut term = 0;
    for found in &entries {
        let id = found.log_id;
        if id.index != next || id.leader_id.term < term {
            return Err(format!("entry {next} is followed by {id}, in a log of term {term}"));
        }
        if *found != entry(id.leader_id.term, id.index) {
            return Err(format!("entry {id} is not what was appended"));
        }
        (next, term) = (id.index + 1, id.leader_id.term);
        if told.entries.get(&id.index).is_some_and(|told| *told != term) {
            return Err(format!("entry {id} has come back from before it was replaced"));
        }
    }
    if let Some((end, _)) = told.entries.last_key_value()
        && next <= *end
    {
        return Err(format!("the log ends before {next}, and {end} was acknowledged"));
    }
    if last.map_or(0, |id| id.index + 1) != next {
        return Err(format!("the log says that it ends at {last:?}, and ends before {next}"));
    }
    let published = contents.state_machine.published().current();
    let snapshot = published.last.map(|id| id.index);
    if snapshot < told.snapshot || snapshot < purged {
        return Err(format!("the snapshot is at {snapshot:?}, told {:?}, purged {purged:?}", told.snapshot));
    }
    let mut expected = State::default();
    for index in 0..snapshot.map_or(0, |index| index + 1) {
        let term = told.entries.get(&index).or_else(|| told.receiving.get(&index));
        let term = term.ok_or_else(|| format!("a snapshot of entry {index}, never acknowledged"))?;
        apply(&mut expected, &entry(*term, index));
    }
    if expected != published.state || expected.digest() != published.state.digest() {
        return Err(format!("the snapshot at {snapshot:?} is not what the log gives"));
    }
    Ok(())
}
