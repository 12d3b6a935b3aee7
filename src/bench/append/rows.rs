//! Which rows clients have appended, which a table holds, and whether the two agree.

use std::collections::HashMap;

/// What became of one client's appends, by number.
#[derive(Debug)]
pub struct Appended {
    client: i64,
    outcomes: Vec<Outcome>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Acknowledged,
    Refused,
    Unknown,
}

impl Appended {
    pub fn new(client: i64) -> Self {
        Self { client, outcomes: Vec::new() }
    }

    /// The number of the next append.
    pub fn next(&self) -> i64 {
        self.outcomes.len() as i64
    }

    pub fn acknowledged(&mut self) {
        self.outcomes.push(Outcome::Acknowledged);
    }

    /// It has failed, and may be there nevertheless if that is not known.
    pub fn failed(&mut self, unknown: bool) {
        self.outcomes.push(if unknown { Outcome::Unknown } else { Outcome::Refused });
    }
}

/// How often each row is there.
#[derive(Debug, Default)]
pub struct Found {
    counts: HashMap<(i64, i64), u32>,
    rows: u64,
}

impl Found {
    pub fn add(&mut self, client: i64, number: i64) {
        *self.counts.entry((client, number)).or_default() += 1;
        self.rows += 1;
    }
}

/// What is wrong with a table's rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Verdict {
    /// Acknowledged, and not there.
    pub missing: u64,
    /// There more than once.
    pub doubled: u64,
    /// There, and its client was told that it is not, or nobody has appended it.
    pub unasked: u64,
}

/// How many rows there are, and what is wrong with them.
pub fn judge(appended: &[Appended], found: &Found) -> (u64, Verdict) {
    let mut verdict = Verdict::default();
    let mut known = 0;
    for client in appended {
        for (number, outcome) in client.outcomes.iter().enumerate() {
            let count = found.counts.get(&(client.client, number as i64)).copied().unwrap_or(0);
            known += u64::from(count > 0);
            verdict.doubled += u64::from(count > 1);
            match outcome {
                Outcome::Acknowledged => verdict.missing += u64::from(count == 0),
                Outcome::Refused => verdict.unasked += u64::from(count > 0),
                Outcome::Unknown => {}
            }
        }
    }
    verdict.unasked += (found.counts.len() as u64).saturating_sub(known);
    (found.rows, verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_finds_what_is_wrong() {
        let mut client = Appended::new(7);
        client.acknowledged();
        client.failed(false);
        client.failed(true);
        assert_eq!(client.next(), 3);
        let of = |rows: &[(i64, i64)]| {
            let mut found = Found::default();
            rows.iter().for_each(|(client, number)| found.add(*client, *number));
            judge(std::slice::from_ref(&client), &found).1
        };
        let good = Verdict::default();
        assert_eq!((of(&[(7, 0)]), of(&[(7, 0), (7, 2)])), (good, good));
        assert_eq!(of(&[]), Verdict { missing: 1, ..good });
        assert_eq!(of(&[(7, 0), (7, 0)]), Verdict { doubled: 1, ..good });
        assert_eq!(of(&[(7, 0), (7, 1)]), Verdict { unasked: 1, ..good });
        assert_eq!(of(&[(7, 0), (8, 0)]), Verdict { unasked: 1, ..good });
    }
}
