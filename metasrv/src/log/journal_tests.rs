use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const HALF: u64 = 16 * BLOCK;
const ME: &str = "me";

fn frames(first: u64, sizes: &[usize]) -> Vec<Frame> {
    let frame = |(n, size): (usize, &usize)| Frame {
        index: first + n as u64,
        term: 1,
        payload: Bytes::from(vec![(first + n as u64) as u8; *size]),
    };
    sizes.iter().enumerate().map(frame).collect()
}

fn made(dir: &Path) -> (PathBuf, Position, Journal) {
    let path = dir.join("journal");
    let position = Journal::create(&path, ME, HALF).unwrap();
    let (journal, read) = Journal::open(&path, ME, position).unwrap();
    assert!(read.is_empty());
    (path, position, journal)
}

fn reopen(path: &Path, from: Position) -> Vec<Frame> {
    Journal::open(path, ME, from).unwrap().1
}

fn damage(path: &Path, at: u64, bytes: u64) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(&vec![0xa5; bytes as usize], at).unwrap();
}

#[test]
fn what_is_appended_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let (path, start, mut journal) = made(dir.path());
    journal.append(&frames(5, &[10, 0, 3000])).unwrap();
    let middle = journal.end();
    journal.append(&frames(8, &[9000])).unwrap();
    assert_eq!(reopen(&path, start), [frames(5, &[10, 0, 3000]), frames(8, &[9000])].concat());
    assert_eq!(reopen(&path, middle), frames(8, &[9000]));
    assert_eq!(reopen(&path, journal.end()), []);
}

#[test]
fn either_half_is_enough_and_losing_both_of_an_acknowledged_record_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let (path, start, mut journal) = made(dir.path());
    for n in 0..3 {
        journal.append(&frames(n, &[100])).unwrap();
    }
    let whole = std::fs::read(&path).unwrap();
    for half in [0, HALF + BLOCK] {
        damage(&path, half, 3 * BLOCK);
        assert_eq!(reopen(&path, start), frames(0, &[100; 3]), "half {half}");
        std::fs::write(&path, &whole).unwrap();
    }
    damage(&path, BLOCK + 50, 1);
    damage(&path, HALF + 2 * BLOCK + 60, 1);
    let error = Journal::open(&path, ME, start).unwrap_err().to_string();
    assert!(error.contains("record 2") && error.contains("record 3") && error.contains("journal"), "{error}");
}

#[test]
fn damage_that_reaches_both_halves_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let (path, start, mut journal) = made(dir.path());
    journal.append(&frames(0, &[100])).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for from in [0, 1, BLOCK, HALF - 1, HALF] {
        let mut bytes = whole.clone();
        bytes[from as usize..].fill(0);
        std::fs::write(&path, bytes).unwrap();
        let error = Journal::open(&path, ME, start).unwrap_err().to_string();
        assert!(error.contains("divider"), "zeros from {from}: {error}");
    }
}

#[test]
fn a_torn_last_record_is_left_out_and_its_place_is_used_again() {
    let dir = tempfile::tempdir().unwrap();
    let (path, start, mut journal) = made(dir.path());
    journal.append(&frames(0, &[100])).unwrap();
    journal.append(&frames(1, &[3 * BLOCK as usize])).unwrap();
    damage(&path, 3 * BLOCK, 10);
    damage(&path, HALF + 3 * BLOCK, 10);
    let (mut journal, read) = Journal::open(&path, ME, start).unwrap();
    assert_eq!(read, frames(0, &[100]));
    journal.append(&frames(1, &[7])).unwrap();
    assert_eq!(reopen(&path, start), frames(0, &[100, 7]));
}

#[test]
fn a_file_that_is_missing_cut_or_of_another_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (path, start, mut journal) = made(dir.path());
    journal.append(&frames(0, &[100])).unwrap();
    let error = Journal::open(&path, "another", start).unwrap_err().to_string();
    assert!(error.contains("divider"), "{error}");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(2 * HALF - 1).unwrap();
    let error = Journal::open(&path, ME, start).unwrap_err().to_string();
    assert!(error.contains("was made with"), "{error}");
    std::fs::remove_file(&path).unwrap();
    let error = Journal::open(&path, ME, start).unwrap_err().to_string();
    assert!(error.contains("is missing"), "{error}");
}

#[test]
fn too_much_for_now_and_too_much_at_all() {
    let dir = tempfile::tempdir().unwrap();
    let (_, _, mut journal) = made(dir.path());
    let quarter = frames(0, &[4 * BLOCK as usize - 100]);
    assert!(journal.takes(&quarter) && !journal.takes(&frames(0, &[4 * BLOCK as usize])));
    for _ in 0..4 {
        assert!(journal.has_room(&quarter));
        journal.append(&quarter).unwrap();
    }
    assert!(!journal.has_room(&frames(0, &[1])));
    assert!(journal.append(&frames(0, &[1])).is_err());
    journal.release();
    assert!(journal.has_room(&quarter));
}

proptest! {
    /// Against a queue of what was appended and not yet released: after any number of appends, releases and openings, the
    /// journal gives exactly that, whichever half is damaged.
    #[test]
    fn it_gives_back_what_counts(steps in prop::collection::vec((0..4u8, prop::collection::vec(0..5000usize, 1..4)), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let (path, mut position, mut journal) = made(dir.path());
        let mut counts: VecDeque<Frame> = VecDeque::new();
        let mut next = 0;
        for (kind, sizes) in steps {
            let batch = frames(next, &sizes);
            if kind == 0 || !journal.has_room(&batch) {
                position = journal.end();
                journal.release();
                counts.clear();
            }
            if kind == 1 {
                let damaged = next % 2 * (HALF + BLOCK);
                damage(&path, damaged, HALF);
                let (again, read) = Journal::open(&path, ME, position).unwrap();
                prop_assert_eq!(&read, counts.make_contiguous());
                prop_assert_eq!((again.end(), again.used), (journal.end(), journal.used));
                // What counted is in one half only now: as at every start, it goes to sled.
                journal = again;
                position = journal.end();
                journal.release();
                counts.clear();
            }
            if journal.takes(&batch) {
                journal.append(&batch).unwrap();
                next += batch.len() as u64;
                counts.extend(batch);
            }
        }
        prop_assert_eq!(&reopen(&path, position), counts.make_contiguous());
    }
}
