//! `drop_namespace` as the leader runs it: each part of it is one transaction of the map, together with what is kept of the procedure
//! (`lake_client::procedures::drop_namespace` has the steps, and what each changes).

use async_trait::async_trait;
use lake_client::procedures::calls::unix_ms;
use lake_client::procedures::drop_namespace::{
    Comes, DROP, DROP_NAMESPACE, Entries, NamespaceDrop, PURGES, Planned, RESTORE,
};
use lake_client::procedures::{PROCEDURES, Procedure, Record, kept};
use lake_proto::kv::KeyValue;

use super::kinds::Kind;
use super::machine::{Cancel, Outcome, Pace, Terms, Together};
use crate::peer::member::Member;
use crate::state::State;

/// The kind.
#[derive(Debug)]
pub struct DropNamespace;

/// The map, as planning reads it.
pub(super) struct Map<'a>(pub &'a State);

impl Entries for Map<'_> {
    fn get(&self, key: &str) -> Option<KeyValue> {
        self.0.get(key)
    }

    fn list(&self, prefix: &str, limit: usize) -> Vec<KeyValue> {
        self.0.list(prefix, None, limit, usize::MAX).entries
    }
}

#[async_trait]
impl Kind for DropNamespace {
    fn name(&self) -> &'static str {
        DROP_NAMESPACE
    }

    fn terms(&self, _: &Record, _: &Pace) -> Terms {
        Terms::default()
    }

    fn cancel(&self, record: &Record) -> Cancel {
        match record.data::<NamespaceDrop>() {
            Ok(dropping) if dropping.dropped == 0 && dropping.was.is_none() && record.step == DROP => Cancel::Now,
            Ok(_) if record.step == RESTORE => Cancel::TooLate("it is being undone already"),
            Ok(dropping) if dropping.can_be_undone() => Cancel::Back(RESTORE),
            _ => Cancel::TooLate("tables were dropped whose files nobody is to delete: they can be registered again"),
        }
    }

    fn waits_for_children(&self, record: &Record) -> bool {
        record.step == PURGES
    }

    fn holds_children(&self, record: &Record) -> bool {
        // A table that is yet to be dropped would count as a live one, and keep what it shares with those that are.
        record.step == DROP
    }

    async fn execute(&self, member: &Member, procedure: &Procedure) -> Outcome {
        let applied = member.published.current();
        step(&applied.state, procedure)
    }
}

fn step(state: &State, procedure: &Procedure) -> Outcome {
    let Procedure { id, record, .. } = procedure;
    let dropping: NamespaceDrop = match record.data() {
        Ok(dropping) => dropping,
        Err(why) => return Outcome::Doubtful(why),
    };
    let planned = match record.step.as_str() {
        DROP => dropping.drop_some(id, &Map(state), unix_ms()),
        PURGES => return purges(&dropping, &children(state, id)),
        RESTORE => dropping.restore_some(id, &Map(state), &children(state, id), unix_ms()),
        other => return Outcome::Doubtful(format!("there is no step {other}")),
    };
    match planned {
        Ok(planned) => outcome(planned),
        Err(why) => Outcome::Failed(why),
    }
}

/// The procedures that this one is the parent of, and that are remembered.
pub(super) fn children(state: &State, id: &str) -> Vec<Procedure> {
    let all = state.list(PROCEDURES, None, usize::MAX, usize::MAX).entries;
    all.iter().filter_map(Procedure::of).filter(|child| child.record.parent.as_deref() == Some(id)).collect()
}

fn purges(dropping: &NamespaceDrop, children: &[Procedure]) -> Outcome {
    let left = children.iter().filter(|child| !child.record.state.is_ended()).count();
    match left {
        0 => Outcome::Done { data: kept(dropping), note: so_far(dropping) },
        // Not how many are left: nobody looks at it again until all have ended.
        _ => Outcome::Wait(format!("{}; waits for the end of its purges: {}", so_far(dropping), dropping.purges)),
    }
}

fn outcome(planned: Planned) -> Outcome {
    let Planned { txn, releases, now, comes } = planned;
    let (data, note) = (kept(&now), so_far(&now));
    let then = match comes {
        Comes::Step(step) => Outcome::Next { step, data, note },
        Comes::End => Outcome::Done { data, note },
        Comes::Undone => Outcome::Undone { data, note },
    };
    Outcome::Together(Box::new(Together { txn, releases }), Box::new(then))
}

fn so_far(dropping: &NamespaceDrop) -> String {
    let NamespaceDrop { dropped, restored, .. } = dropping;
    let mut text = format!("tables and views dropped: {dropped}");
    if *restored > 0 {
        text.push_str(&format!("; of them there again: {restored}"));
    }
    text
}

#[cfg(test)]
mod tests {
    use lake_client::procedures::State as Stands;
    use lake_client::procedures::drop_namespace::of_namespace;

    use super::*;

    fn record(step: &str, change: impl FnOnce(&mut NamespaceDrop)) -> Record {
        let (_, record) = of_namespace(&"a".parse().unwrap(), 3, true, 0);
        let mut dropping = record.data().unwrap();
        change(&mut dropping);
        Record { step: step.to_owned(), data: kept(&dropping), ..record }
    }

    #[test]
    fn it_is_cancelled_or_undone_or_goes_on() {
        let cancel = |record: &Record| DropNamespace.cancel(record);
        assert_eq!(cancel(&record(DROP, |_| {})), Cancel::Now);
        assert_eq!(cancel(&record(DROP, |now| now.dropped = 1)), Cancel::Back(RESTORE));
        assert_eq!(cancel(&record(PURGES, |now| now.dropped = 1)), Cancel::Back(RESTORE));
        let too_late = |record| matches!(cancel(&record), Cancel::TooLate(_));
        assert!(too_late(record(RESTORE, |now| now.dropped = 1)));
        assert!(too_late(record(DROP, |now| (now.dropped, now.lost) = (2, 1))));
        assert!(too_late(record(DROP, |now| (now.dropped, now.purge) = (2, false))));
        let waits = |step| DropNamespace.waits_for_children(&record(step, |_| {}));
        assert!(waits(PURGES) && !waits(DROP) && !waits(RESTORE));
    }

    #[test]
    fn it_is_done_once_its_children_have_ended() {
        let dropping: NamespaceDrop = record(PURGES, |now| (now.dropped, now.purges) = (3, 2)).data().unwrap();
        let child =
            |state| Procedure { id: "c".into(), mod_revision: 1, record: Record { state, ..record(DROP, |_| {}) } };
        let ended = [Stands::Done, Stands::Failed, Stands::Cancelled].map(child);
        assert!(matches!(purges(&dropping, &ended), Outcome::Done { .. }));
        for state in [Stands::Active, Stands::Poisoned] {
            let Outcome::Wait(note) = purges(&dropping, &[child(Stands::Done), child(state)]) else { panic!() };
            assert_eq!(note, "tables and views dropped: 3; waits for the end of its purges: 2");
        }
    }
}
