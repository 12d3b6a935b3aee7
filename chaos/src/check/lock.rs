//! Locks with fences: does an old holder ever write after a newer one was admitted?
//!
//! A holder may believe in its lock long after it has lost it; what protects the register is the fence. So two holders
//! at one time are no violation by themselves, but these are, per lock:
//! - two grants of one fence; a grant after another one, with a lower fence;
//! - an acknowledged write under a fence, begun after a higher fence was seen in any acknowledged answer, or at a later
//!   revision than the grant of a higher fence or a write under it (*written under an old fence*);
//! - an acknowledged write begun after its own fence had been released, or under a fence that nobody was granted;
//! - a read that shows the value of a fence after an acknowledged answer showed that of a higher one (*went back*): a
//!   write of unknown outcome that took effect too late;
//! - a write refused because the lease was over, when the holder had an answer that it is alive for longer (*over early*), unless
//!   clocks were made to differ;
//! - a grant refused because of a lock that had been let go before (*still held*), or a lock let go by its holder that was not
//!   held any more while its lease was alive (*not held*);
//! - a grant whose answer shows that a key of an earlier holder, which hung on a lease, is still there (*left behind*), or that
//!   one is gone which did not hang on it any more when it ended (*taken along*).
//!
//! Where no lock was granted more than once nothing was excluded, and nothing shown.
//!
//! That the register itself is linearizable is for [`super::linear`] to say.

use std::collections::{BTreeMap, HashMap};

use super::Verdict;
use super::bars::Bar;
use super::outcome::{Finding, Findings, Outcome};
use crate::history::{Action, Call, History, Key, Lock, Outcome as End};

/// Its name in results.
pub const NAME: &str = "locks";

/// Why a write was refused that should not have been: as the history says it.
pub const OVER_EARLY: &str = "the lease is over, and was granted or kept alive for longer";

/// Why a grant was refused that should not have been.
pub const STILL_HELD: &str = "a lock is in the way that was let go before";

/// What is wrong about letting go: as the history says it.
pub const NOT_HELD: &str = "its lease is alive, and it was not held any more";

/// What is wrong about a grant: as the history says it.
pub const LEFT_BEHIND: &str = "a key is there that hung on the lease of an earlier holder";

/// The same.
pub const TAKEN_ALONG: &str = "a key is gone that did not hang on a lease any more when that ended";

/// What an answer shows of a fence.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    Granted,
    Wrote,
    Released,
    /// A value written under it was read.
    Read,
}

/// An acknowledged answer in which a fence was seen.
#[derive(Clone, Copy)]
struct Seen<'a> {
    call: &'a Call,
    fence: u64,
    what: What,
    revision: Option<u64>,
}

/// Judges every lock of a history. Where clocks were made to differ (`drift`), a lease may be over early.
pub fn check(history: &History, drift: bool) -> Outcome {
    let mut findings = Findings::default();
    let locks = locks(history);
    if !drift {
        judge_refusals(history, &mut findings);
    }
    judge_keys(history, &mut findings);
    for (lock, seen) in &locks {
        let report = Report { history, lock };
        judge_grants(&report, seen, &mut findings);
        judge_by_time(&report, seen, &mut findings);
        judge_by_revision(&report, seen, &mut findings);
    }
    let count = |what| locks.values().flatten().filter(|seen| seen.what == what).count();
    let (granted, written) = (count(What::Granted), count(What::Wrote));
    let handed_on = |seen: &Vec<Seen<'_>>| seen.iter().filter(|seen| seen.what == What::Granted).count() > 1;
    let otherwise = match (granted, written) {
        (0, _) => Verdict::Unknown("no lock was acquired".into()),
        (_, 0) => Verdict::Unknown("no guarded write succeeded".into()),
        _ if !locks.values().any(handed_on) => Verdict::Unknown("no lock was acquired more than once".into()),
        _ => Verdict::Valid,
    };
    findings.conclude(NAME, otherwise).with("grants", granted).with("guarded writes", written)
}

/// By lock, all answers in the order of invocation.
fn locks(history: &History) -> BTreeMap<&Key, Vec<Seen<'_>>> {
    let mut fences: HashMap<(&Key, i64), u64> = HashMap::new();
    let mut locks: BTreeMap<&Key, Vec<Seen<'_>>> = BTreeMap::new();
    for call in history.calls() {
        if let Action::Lock(Lock::Write { lock, fence, value }) = history.action(call) {
            fences.insert((lock, *value), *fence);
        }
    }
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let Action::Lock(action) = history.action(call) else { continue };
        let (lock, fence, what) = match action {
            Lock::Acquire { lock, fence } => (lock, *fence, What::Granted),
            Lock::Release { lock, fence } => (lock, Some(*fence), What::Released),
            Lock::Write { lock, fence, .. } => (lock, Some(*fence), What::Wrote),
            Lock::Read { lock, value } => {
                (lock, value.and_then(|value| fences.get(&(lock, value)).copied()), What::Read)
            }
        };
        if let Some(fence) = fence {
            let revision = history.revision(call);
            locks.entry(lock).or_default().push(Seen { call, fence, what, revision });
        }
    }
    locks
}

/// The holder looks at its clock when the refusal is here: by then the lease should have been alive still.
fn judge_refusals(history: &History, findings: &mut Findings) {
    let is_early = |call: &&Call| history.end(call).is_some_and(|end| end.refusal.as_deref() == Some(OVER_EARLY));
    for call in history.calls().iter().filter(is_early) {
        let Action::Lock(Lock::Write { lock, fence, .. }) = history.action(call) else { continue };
        let what = format!("a write under fence {fence} was refused while its lease had to be alive");
        Report { history, lock }.add(findings, "over early", &what, [call, call]);
    }
}

/// Keys that did not end with their leases, or did with others', and locks that do not end or did by themselves.
fn judge_keys(history: &History, findings: &mut Findings) {
    for call in history.calls() {
        let Some(end) = history.end(call) else { continue };
        match history.action(call) {
            Action::Lock(Lock::Acquire { lock, .. }) if end.refusal.as_deref() == Some(STILL_HELD) => {
                let what = "it was refused because of a fence that had been let go before";
                Report { history, lock }.add(findings, "still held", what, [call, call]);
            }
            Action::Lock(Lock::Release { lock, fence }) if end.error.as_deref() == Some(NOT_HELD) => {
                let what = format!("it was not held any more under fence {fence}, whose lease was alive");
                Report { history, lock }.add(findings, "not held", &what, [call, call]);
            }
            _ => {}
        }
    }
    for call in history.calls().iter().filter(|call| call.outcome == End::Ok) {
        let Action::Lock(Lock::Acquire { lock, fence: Some(fence) }) = history.action(call) else { continue };
        let (kind, which) = match history.end(call).and_then(|end| end.error.as_deref()) {
            Some(LEFT_BEHIND) => ("left behind", "came a key that hung on the lease of an earlier holder"),
            Some(TAKEN_ALONG) => ("taken along", "a key is gone that an earlier holder had taken off its lease"),
            _ => continue,
        };
        let what = format!("with fence {fence} {which}");
        Report { history, lock }.add(findings, kind, &what, [call, call]);
    }
}

struct Report<'a> {
    history: &'a History,
    lock: &'a Key,
}

impl Report<'_> {
    fn add(&self, findings: &mut Findings, kind: &str, what: &str, calls: [&Call; 2]) {
        let what = format!("lock {}: {what}", self.lock);
        findings.add(kind, || Finding::new(kind, what, Bar::all(self.history, calls)));
    }

    fn old_fence(&self, findings: &mut Findings, higher: &Seen<'_>, write: &Seen<'_>) {
        let did = match higher.what {
            What::Granted => "was granted",
            What::Wrote => "had written",
            What::Released => "was released",
            What::Read => "was read",
        };
        let what = format!("a write under fence {} succeeded after fence {} {did}", write.fence, higher.fence);
        self.add(findings, "written under an old fence", &what, [higher.call, write.call]);
    }
}

fn judge_grants(report: &Report<'_>, seen: &[Seen<'_>], findings: &mut Findings) {
    let mut granted: HashMap<u64, &Call> = HashMap::new();
    for grant in seen.iter().filter(|seen| seen.what == What::Granted) {
        if let Some(other) = granted.insert(grant.fence, grant.call) {
            let what = format!("fence {} was granted twice", grant.fence);
            report.add(findings, "one fence for two", &what, [other, grant.call]);
        }
    }
    let released: HashMap<u64, &Call> =
        seen.iter().filter(|seen| seen.what == What::Released).map(|seen| (seen.fence, seen.call)).collect();
    for write in seen.iter().filter(|seen| seen.what == What::Wrote) {
        if !granted.contains_key(&write.fence) {
            let what = format!("a write succeeded under fence {}, which nobody was granted", write.fence);
            report.add(findings, "a fence of nobody", &what, [write.call, write.call]);
        }
        if let Some(release) = released.get(&write.fence)
            && release.ended.is_some_and(|ended| ended < write.call.invoked)
        {
            let what = format!("a write under fence {} succeeded after that had been released", write.fence);
            report.add(findings, "written after release", &what, [release, write.call]);
        }
    }
}

/// Compares each answer with the highest fences that were seen before it began.
fn judge_by_time(report: &Report<'_>, seen: &[Seen<'_>], findings: &mut Findings) {
    let mut by_end: Vec<&Seen<'_>> = seen.iter().collect();
    by_end.sort_unstable_by_key(|seen| seen.call.ended);
    let mut by_end = by_end.into_iter().peekable();
    // Of all answers, and of those that show a value in the register.
    let (mut highest, mut highest_value): (Option<&Seen<'_>>, Option<&Seen<'_>>) = (None, None);
    for now in seen {
        while let Some(before) = by_end.next_if(|before| before.call.ended < Some(now.call.invoked)) {
            let newer = |highest: Option<&Seen<'_>>| highest.is_none_or(|highest| highest.fence < before.fence);
            if newer(highest) {
                highest = Some(before);
            }
            if matches!(before.what, What::Wrote | What::Read) && newer(highest_value) {
                highest_value = Some(before);
            }
        }
        let above = |highest: Option<&'_ Seen<'_>>| highest.is_some_and(|highest| highest.fence > now.fence);
        match (now.what, highest, highest_value) {
            (What::Wrote, Some(higher), _) if above(highest) => report.old_fence(findings, higher, now),
            (What::Granted, Some(higher), _) if above(highest) => {
                let what = format!("fence {} was granted after fence {} had been seen", now.fence, higher.fence);
                report.add(findings, "fences went back", &what, [higher.call, now.call]);
            }
            (What::Read, _, Some(higher)) if above(highest_value) => {
                let what =
                    format!("the value of fence {} was read after fence {} had written", now.fence, higher.fence);
                report.add(findings, "went back", &what, [higher.call, now.call]);
            }
            _ => {}
        }
    }
}

/// Compares grants and writes in the order in which the system says that it made them.
fn judge_by_revision(report: &Report<'_>, seen: &[Seen<'_>], findings: &mut Findings) {
    let changes = seen.iter().filter(|seen| matches!(seen.what, What::Granted | What::Wrote));
    let mut ordered: Vec<(u64, &Seen<'_>)> = changes.filter_map(|seen| Some((seen.revision?, seen))).collect();
    ordered.sort_by_key(|(revision, seen)| (*revision, seen.fence));
    let mut highest: Option<&Seen<'_>> = None;
    for (_, now) in ordered {
        match highest {
            Some(higher) if higher.fence > now.fence && now.what == What::Wrote => {
                // What time shows as well is reported once.
                if higher.call.ended > Some(now.call.invoked) {
                    report.old_fence(findings, higher, now);
                }
            }
            Some(higher) if higher.fence > now.fence => {
                let what = format!("fence {} was granted at a later revision than fence {}", now.fence, higher.fence);
                report.add(findings, "fences went back", &what, [higher.call, now.call]);
            }
            _ => highest = Some(now),
        }
    }
}
