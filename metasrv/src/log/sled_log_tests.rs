use std::os::unix::fs::FileExt;

use super::*;

const INCARNATION: &str = "0123456789abcdef0123456789abcdef";

fn frame(index: u64, len: usize) -> Frame {
    Frame { index, term: 1 + index / 100, payload: vec![index as u8; len].into() }
}

fn frames(indexes: std::ops::Range<u64>, len: usize) -> Vec<Frame> {
    indexes.map(|i| frame(i, len)).collect()
}

fn id(index: u64) -> Option<(u64, u64)> {
    Some((1 + index / 100, index))
}

/// A new log with these entries, closed again.
fn written(dir: &Path, entries: &[Frame]) {
    let log = SledLog::create(dir, INCARNATION).unwrap();
    log.append(entries).unwrap();
    log.sync().unwrap();
}

fn open(
    dir: &Path,
    purged: Option<(u64, u64)>,
    durable: Option<(u64, u64)>,
) -> Result<(SledLog, Option<(u64, u64)>), OpenError> {
    SledLog::open(dir, INCARNATION, Bounds { purged, durable })
}

#[test]
fn entries_of_every_size_survive_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    let edges =
        [0, 1, MAX_VALUE_BYTES - 30, MAX_VALUE_BYTES - 29, MAX_VALUE_BYTES - 28, MAX_VALUE_BYTES, 100_000, 9 << 20];
    let mut entries: Vec<Frame> = edges.iter().zip(0..).map(|(len, index)| frame(index, *len)).collect();
    entries.extend(frames(8..300, 200));
    entries.push(frame(300, 70_000));
    entries.extend(frames(301..310, 10));
    written(&dir, &entries);

    let (log, last) = open(&dir, None, id(309)).unwrap();
    assert_eq!(last, id(309));
    assert_eq!(log.read(0, u64::MAX, usize::MAX).unwrap(), entries);
    for start in [0, 3, 7, 8, 9, 150, 299, 300, 301, 309] {
        let end = (start + 5).min(310);
        assert_eq!(log.read(start, end, usize::MAX).unwrap(), entries[start as usize..end as usize], "from {start}");
    }
    assert_eq!(log.read(8, 300, 1000).unwrap().len(), 5, "a read ends once it has enough bytes");
    assert_eq!(log.read(310, 320, usize::MAX).unwrap(), []);
    assert!(
        std::fs::read_dir(dir.join("blobs")).map_or(true, |mut d| d.next().is_none()),
        "nothing may spill into blobs/"
    );
}

#[test]
fn truncation_keeps_exactly_what_comes_before() {
    for cut in [0, 1, 5, 49, 50, 51, 99] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("log");
        let mut entries = frames(0..50, 100);
        entries.push(frame(50, 100_000));
        entries.extend(frames(51..100, 100));
        written(&dir, &entries);
        let (log, _) = open(&dir, None, id(99)).unwrap();
        log.truncate_from(cut).unwrap();
        let again = Frame { term: 7, ..frame(cut, 10) };
        log.append(std::slice::from_ref(&again)).unwrap();
        log.sync().unwrap();
        drop(log);
        let (log, last) = open(&dir, None, Some((7, cut))).unwrap();
        assert_eq!(last, Some((7, cut)));
        let mut expected = entries[..cut as usize].to_vec();
        expected.push(again);
        assert_eq!(log.read(0, u64::MAX, usize::MAX).unwrap(), expected, "cut at {cut}");
    }
}

#[test]
fn entries_from_before_a_truncation_do_not_pass_for_those_that_replaced_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    let with_term = |term: u64, indexes: std::ops::Range<u64>| {
        indexes.map(|index| Frame { term, ..frame(index, 100) }).collect::<Vec<_>>()
    };
    let log = SledLog::create(&dir, INCARNATION).unwrap();
    log.append(&with_term(1, 0..10)).unwrap();
    log.append(&with_term(1, 10..20)).unwrap();
    let old = log.log.get(head_key(10)).unwrap().unwrap();
    log.truncate_from(10).unwrap();
    log.append(&with_term(2, 10..20)).unwrap();
    log.append(&with_term(2, 20..30)).unwrap();
    log.sync().unwrap();
    drop(log);
    let (log, last) = open(&dir, None, Some((2, 29))).unwrap();
    assert_eq!(last, Some((2, 29)));
    // As if damage had undone one write: contiguous, terms that rise, every checksum right, and wrong.
    log.log.insert(head_key(10), old).unwrap();
    log.sync().unwrap();
    let error = log.read(0, 30, usize::MAX).unwrap_err().to_string();
    assert!(error.contains("entry 20 was not written behind the entry that is before it now"), "{error}");
    drop(log);
    let error = open(&dir, None, Some((2, 29))).unwrap_err();
    assert!(matches!(&error, OpenError::Damaged { what, .. } if what.contains("entry 20 was not written")), "{error}");
}

#[test]
fn purging_goes_in_steps_and_leaves_what_comes_behind() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    let log = SledLog::create(&dir, INCARNATION).unwrap();
    for i in 0..350 {
        log.append(&[frame(i, 10)]).unwrap();
    }
    log.append(&frames(350..400, 10)).unwrap();
    log.sync().unwrap();
    let mut steps = 1;
    while log.purge_some(370).unwrap() {
        steps += 1;
    }
    assert_eq!(steps, 4, "350 values in steps of {REMOVE_KEYS}");
    assert_eq!(
        log.read(0, u64::MAX, usize::MAX).unwrap(),
        frames(350..400, 10),
        "a value that is still needed stays whole"
    );
    drop(log);
    let (log, last) = open(&dir, id(370), id(399)).unwrap();
    assert_eq!(last, id(399));
    assert_eq!(log.read(371, 380, usize::MAX).unwrap(), frames(371..380, 10));
}

#[test]
fn a_log_that_ends_before_what_was_acknowledged_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    written(&dir, &frames(0..10, 10));
    let error = open(&dir, None, id(10)).unwrap_err();
    assert!(matches!(error, OpenError::Behind { acknowledged: 10, .. }), "{error}");
    let said = error.to_string();
    assert!(said.contains("index 9") && said.contains("leave the peer stopped"), "{said}");
    assert!(open(&dir, None, id(9)).is_ok());
    assert!(open(&dir, None, id(5)).is_ok(), "entries behind the acknowledged end stay");
}

#[test]
fn a_hole_is_damage_where_it_was_acknowledged_and_a_torn_end_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    let mut entries = frames(0..10, 10);
    entries.push(frame(12, 10));
    let log = SledLog::create(&dir, INCARNATION).unwrap();
    log.append(&entries[..10]).unwrap();
    log.append(&entries[10..]).unwrap();
    log.sync().unwrap();
    drop(log);
    let error = open(&dir, None, id(12)).unwrap_err();
    assert!(matches!(&error, OpenError::Damaged { what, .. } if what.contains("entry 10 is missing")), "{error}");
    let (log, last) = open(&dir, None, id(9)).unwrap();
    assert_eq!(last, id(9));
    assert_eq!(log.read(0, u64::MAX, usize::MAX).unwrap(), frames(0..10, 10));
}

#[test]
fn an_incomplete_large_entry_at_the_end_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    let log = SledLog::create(&dir, INCARNATION).unwrap();
    log.append(&frames(0..3, 10)).unwrap();
    log.append(&[frame(3, 200_000)]).unwrap();
    log.log.remove(part_key(3, 5)).unwrap();
    log.sync().unwrap();
    drop(log);
    assert!(matches!(open(&dir, None, id(3)).unwrap_err(), OpenError::Damaged { .. }));
    let (log, last) = open(&dir, None, id(2)).unwrap();
    assert_eq!(last, id(2));
    log.append(&[frame(3, 5)]).unwrap();
    assert_eq!(log.read(0, u64::MAX, usize::MAX).unwrap().len(), 4);
}

#[test]
fn a_wrong_checksum_inside_a_value_keeps_the_entries_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    written(&dir, &frames(0..10, 10));
    let (log, _) = open(&dir, None, id(9)).unwrap();
    let mut value = log.log.get(head_key(0)).unwrap().unwrap().to_vec();
    let seventh = 1 + 7 * (FRAME_HEADER_BYTES + 10) + FRAME_HEADER_BYTES;
    value[seventh] ^= 1;
    log.log.insert(head_key(0), value).unwrap();
    log.sync().unwrap();
    let said = log.read(0, 10, usize::MAX).unwrap_err().to_string();
    assert!(said.contains("entry 7") && said.contains("db"), "{said}");
    drop(log);
    assert!(matches!(open(&dir, None, id(9)).unwrap_err(), OpenError::Damaged { .. }));
    let (log, last) = open(&dir, None, id(6)).unwrap();
    assert_eq!(last, id(6));
    assert_eq!(log.read(0, u64::MAX, usize::MAX).unwrap(), frames(0..7, 10));
}

/// The file is as it was written, or opening says what is wrong and names it: never a panic, never fewer entries.
fn opens_whole_or_says_why(dir: &Path, entries: &[Frame]) -> bool {
    match open(dir, None, id(entries.len() as u64 - 1)) {
        Ok((log, _)) => match log.read(0, u64::MAX, usize::MAX) {
            Ok(read) => {
                assert_eq!(read, entries);
                true
            }
            Err(e) => {
                assert!(e.to_string().contains(&dir.display().to_string()), "{e}");
                false
            }
        },
        Err(e) => {
            assert!(e.to_string().contains(&dir.display().to_string()), "{e}");
            false
        }
    }
}

fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_dir() {
            copy_dir(&entry.path(), &to.join(entry.file_name()));
        } else {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_never_met_with_a_panic_or_with_silence() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good");
    let entries = frames(0..400, 150);
    written(&good, &entries);
    let used = std::fs::read(good.join("db")).unwrap().iter().rposition(|b| *b != 0).unwrap();
    let mut noticed = 0;
    for n in 0..24u64 {
        let bad = dir.path().join(format!("bad-{n}"));
        copy_dir(&good, &bad);
        let file = File::options().read(true).write(true).open(bad.join("db")).unwrap();
        let at = (used as u64 * n + 17) / 24;
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ (1 << (n % 8))], at).unwrap();
        noticed += usize::from(!opens_whole_or_says_why(&bad, &entries));
    }
    assert!(noticed > 12, "only {noticed} of 24 flipped bits made a difference");
}

#[test]
fn a_truncated_file_is_never_met_with_a_panic_or_with_silence() {
    let dir = tempfile::tempdir().unwrap();
    let good = dir.path().join("good");
    let entries = frames(0..400, 150);
    written(&good, &entries);
    let used = std::fs::read(good.join("db")).unwrap().iter().rposition(|b| *b != 0).unwrap();
    for n in 0..12u64 {
        let bad = dir.path().join(format!("bad-{n}"));
        copy_dir(&good, &bad);
        let file = File::options().write(true).open(bad.join("db")).unwrap();
        file.set_len(used as u64 * n / 12).unwrap();
        assert!(!opens_whole_or_says_why(&bad, &entries), "a file cut to {n}/12 cannot be whole");
    }
    let bad = dir.path().join("gone");
    copy_dir(&good, &bad);
    std::fs::remove_file(bad.join("db")).unwrap();
    let error = open(&bad, None, None).unwrap_err().to_string();
    assert!(error.contains("db is missing"), "{error}");
}

#[test]
fn a_damaged_conf_is_told_as_damage_of_this_directory() {
    let dir = tempfile::tempdir().unwrap();
    let healthy = dir.path().join("healthy");
    written(&healthy, &frames(0..3, 10));
    let conf = std::fs::read(healthy.join("conf")).unwrap();
    let mut refused = 0;
    for at in 0..conf.len() {
        let log = dir.path().join(format!("{at}"));
        std::fs::create_dir(&log).unwrap();
        std::fs::copy(healthy.join("db"), log.join("db")).unwrap();
        let mut bad = conf.clone();
        bad[at] ^= 1;
        std::fs::write(log.join("conf"), bad).unwrap();
        match open(&log, None, id(2)) {
            Ok((_, last)) => assert_eq!(last, id(2)),
            Err(error) => {
                assert!(matches!(error, OpenError::Damaged { .. }), "byte {at}: {error}");
                assert!(error.to_string().contains(&log.display().to_string()), "byte {at}: {error}");
                refused += 1;
            }
        }
    }
    assert!(refused > 0);
}

#[test]
fn the_log_of_another_directory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("log");
    written(&dir, &frames(0..3, 10));
    let error = SledLog::open(&dir, "another", Bounds::default()).unwrap_err();
    assert!(matches!(error, OpenError::OtherPeer { .. }), "{error}");
}
