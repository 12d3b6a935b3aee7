//! `purge_warehouse` as the leader runs it: each part of it is one transaction of the map, together with what is kept of the procedure
//! (`lake_client::procedures::purge_warehouse` has the steps, and what each changes).

use async_trait::async_trait;
use lake_client::procedures::calls::unix_ms;
use lake_client::procedures::drop_namespace::{Comes, DROP, PURGES, Planned};
use lake_client::procedures::purge::{IDS, PURGE_TABLE, Purge};
use lake_client::procedures::purge_warehouse::{PURGE_WAREHOUSE, REMOVE, WarehousePurge};
use lake_client::procedures::{Procedure, Record, State as Stands, kept, key};
use lake_proto::kv::Txn;

use super::drop_namespace::{Map, children};
use super::kinds::Kind;
use super::machine::{Cancel, Outcome, Pace, Terms, Together};
use crate::peer::member::Member;
use crate::state::State;

/// The kind.
#[derive(Debug)]
pub struct PurgeWarehouse;

#[async_trait]
impl Kind for PurgeWarehouse {
    fn name(&self) -> &'static str {
        PURGE_WAREHOUSE
    }

    fn terms(&self, _: &Record, _: &Pace) -> Terms {
        Terms::default()
    }

    fn cancel(&self, record: &Record) -> Cancel {
        match record.data::<WarehousePurge>() {
            Ok(purge) if purge.dropped == 0 && record.step == DROP => Cancel::Now,
            _ => Cancel::TooLate(
                "what was dropped is not had back; the purges of its tables can be cancelled one by one",
            ),
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
    let purge: WarehousePurge = match record.data() {
        Ok(purge) => purge,
        Err(why) => return Outcome::Doubtful(why),
    };
    let planned = match record.step.as_str() {
        DROP => purge.drop_some(id, &Map(state), unix_ms()),
        PURGES => return purges(&purge, &children(state, id), &dropped_before(state, id, &purge)),
        REMOVE => purge.remove(&Map(state)),
        other => return Outcome::Doubtful(format!("there is no step {other}")),
    };
    match planned {
        Ok(planned) => outcome(planned),
        Err(why) => Outcome::Failed(why),
    }
}

/// The purges that go on, and are no children of this procedure, of tables whose files are reached as the warehouse says: what was dropped
/// before. No other one can come, since nothing is dropped from the namespace but by this procedure.
fn dropped_before(state: &State, id: &str, purge: &WarehousePurge) -> Vec<Procedure> {
    let profile = purge.profile(&Map(state));
    let is_its = |other: &Procedure| {
        let Record { kind, parent, state, .. } = &other.record;
        let is_purge = kind == PURGE_TABLE && !state.is_ended() && parent.as_deref() != Some(id);
        is_purge && other.record.data().is_ok_and(|table: Purge| purge.reaches(&table, profile.as_ref()))
    };
    let all = state.list(&key(IDS), None, usize::MAX, usize::MAX).entries;
    all.iter().filter_map(Procedure::of).filter(is_its).collect()
}

fn purges(purge: &WarehousePurge, children: &[Procedure], before: &[Procedure]) -> Outcome {
    // Its files are there, and may be a live table's: what reaches them stays.
    if let Some(child) = children.iter().find(|child| child.record.state == Stands::Failed) {
        let (id, why) = (&child.id, &child.record.note);
        return Outcome::Doubtful(format!("{}; purge {id} has failed, so the warehouse stays: {why}", so_far(purge)));
    }
    let left = children.iter().filter(|child| !child.record.state.is_ended()).count();
    match (left, before) {
        (0, []) => Outcome::Next { step: REMOVE, data: kept(purge), note: so_far(purge) },
        // Without the warehouse nobody would reach their files any more.
        (0, [first, ..]) => Outcome::Wait(format!(
            "{}; waits for the end of purges of tables that were dropped before: {}, {} first",
            so_far(purge),
            before.len(),
            first.id
        )),
        // Not how many are left: nobody looks at it again until all have ended.
        _ => Outcome::Wait(format!("{}; waits for the end of its purges: {}", so_far(purge), purge.purges)),
    }
}

fn outcome(planned: Planned<WarehousePurge>) -> Outcome {
    let Planned { txn, releases, now, comes } = planned;
    let (data, note) = (kept(&now), so_far(&now));
    let then = match comes {
        Comes::Step(step) => Outcome::Next { step, data, note },
        Comes::End | Comes::Undone => Outcome::Done { data, note },
    };
    match txn == Txn::default() {
        true => then,
        false => Outcome::Together(Box::new(Together { txn, releases }), Box::new(then)),
    }
}

fn so_far(purge: &WarehousePurge) -> String {
    let mut text = format!("tables, views and schemas dropped: {}", purge.dropped);
    if purge.lost > 0 {
        text.push_str(&format!("; tables that could not be read, and whose files stay: {}", purge.lost));
    }
    text
}

#[cfg(test)]
mod tests {
    use lake_client::catalog::{TableIdent, TablePointer};
    use lake_client::procedures::purge::of_drop;
    use lake_client::procedures::purge_warehouse::of_warehouse;

    use super::*;
    use crate::state::command::Action;

    #[test]
    fn it_waits_for_its_purges_and_is_cancelled_only_before_anything_is_dropped() {
        let (id, record) = of_warehouse("w", 3, 0).unwrap();
        let purge: WarehousePurge = record.data().unwrap();
        assert_eq!(PurgeWarehouse.cancel(&record), Cancel::Now);
        let begun = kept(&WarehousePurge { dropped: 1, purges: 1, ..purge.clone() });
        let too_late = |record: &Record| matches!(PurgeWarehouse.cancel(record), Cancel::TooLate(_));
        assert!(too_late(&Record { data: begun, ..record.clone() }));
        let waits = Record { step: PURGES.to_owned(), ..record.clone() };
        assert!(too_late(&waits) && PurgeWarehouse.waits_for_children(&waits));
        let child = |state| Procedure { id: id.clone(), mod_revision: 1, record: Record { state, ..record.clone() } };
        assert!(matches!(purges(&purge, &[child(Stands::Poisoned)], &[]), Outcome::Wait(_)));
        let ended = [child(Stands::Done), child(Stands::Cancelled)];
        let Outcome::Wait(why) = purges(&purge, &ended, &[child(Stands::Active)]) else { panic!("it does not wait") };
        assert!(why.contains("purges of tables that were dropped before: 1,") && why.contains(&id), "{why}");
        let over = purges(&purge, &ended, &[]);
        assert!(matches!(over, Outcome::Next { step: REMOVE, .. }), "{over:?}");
        // What reaches the files of a table that is live, say, stays.
        let failed = purges(&purge, &[child(Stands::Done), child(Stands::Failed)], &[]);
        assert!(matches!(failed, Outcome::Doubtful(_)), "{failed:?}");
    }

    #[test]
    fn it_waits_for_the_purges_of_what_was_dropped_from_it_before() {
        let mut state = State::default();
        let (own, record) = of_warehouse("w", 3, 0).unwrap();
        let mut submit = |id: &str, record: &Record| {
            state.apply(1, &Action::Txn(record.submission(id)).unstamped());
        };
        let dropped = |namespace: &str, uuid| {
            let ident = TableIdent::new(namespace.parse().unwrap(), "t").unwrap();
            let (uuid, metadata_location) = (uuid::Uuid::from_u128(uuid), "file:///elsewhere/1".to_owned());
            of_drop(&ident, &TablePointer { uuid, metadata_location, previous_location: None }, 3, 0)
        };
        let [(waits, of_nested), (child, of_child), (over, of_over), (other, of_other)] =
            [("w.a", 1), ("w", 2), ("w", 3), ("x", 4)].map(|(namespace, uuid)| dropped(namespace, uuid));
        submit(&own, &record);
        submit(&waits, &of_nested);
        submit(&child, &Record { parent: Some(own.clone()), ..of_child });
        submit(&over, &Record { state: Stands::Cancelled, ..of_over });
        submit(&other, &of_other);
        let before = dropped_before(&state, &own, &record.data().unwrap());
        assert_eq!(before.iter().map(|purge| purge.id.as_str()).collect::<Vec<_>>(), [waits]);
    }
}
