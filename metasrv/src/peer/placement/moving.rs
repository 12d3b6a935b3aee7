//! Moves that are asked for, and what surrounds the one transaction that a move is where who has the shard lives.
//!
//! ```text
//!   warm: the target reads what the upkeep      the route      leave: the source ends what it does
//!   of the shard's tables begins with      ---> is changed ---> for the shard                      ---> told as moved
//! ```
//! Nothing hangs on what surrounds it: a target that is not warm reads later, and what the source commits for the shard is refused from
//! the change on, whatever it does. So nothing is kept of it: if the leader dies, the rest is left out, and who asked asks again.
//!
//! Those that the leader makes by itself go on beside its looks ([`UnderWay`]), and end with its duties.
//!
//! Limits: [`WARM_WITHIN`] and [`LEAVE_WITHIN`], and of what is left until the caller is to be answered half each; [`MOVES_AT_ONCE`] that the
//! leader makes by itself, and of those that are asked for. Failure cases: a node that is not connected, does not answer in time, or
//! knows no such instruction is not waited for, and the shard is moved all the same.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use lake_client::clock;
use lake_client::nodes::validate_node;
use lake_client::shards::{LEAVE_SHARD, LEAVE_WITHIN, Moving, WARM_SHARD, WARM_WITHIN};
use lake_proto::kv::{Compare, Revision};
use lake_proto::v1;
use lake_proto::v1::error_detail::Kind;
use tokio::task::{AbortHandle, JoinSet};

use super::plan::{self, Change};
use super::{MOVE_WITHIN, MOVES_AT_ONCE, RACES};
use crate::peer::failure::Failure;
use crate::peer::member::Member;
use crate::peer::procedures::failpoints::{LEAVE, Point, WARM, reached_in};
use crate::peer::shares::Call;

/// Moves that the leader makes by itself of shards whose workers live, each until its source has answered. They are ended by dropping it.
#[derive(Debug, Default)]
pub(super) struct UnderWay {
    tasks: JoinSet<()>,
    begun: BTreeMap<u32, (Change, AbortHandle)>,
}

impl UnderWay {
    /// Those that have not ended.
    pub fn moves(&self) -> impl Iterator<Item = &Change> {
        self.begun.values().filter(|(_, task)| !task.is_finished()).map(|(change, _)| change)
    }

    /// Whether this shard is being moved.
    pub fn has(&self, shard: u32) -> bool {
        self.begun.get(&shard).is_some_and(|(_, task)| !task.is_finished())
    }

    /// Begins one, unless the shard is being moved already or as many are as may be.
    pub fn begin(&mut self, change: Change, work: impl Future<Output = ()> + Send + 'static) {
        while self.tasks.try_join_next().is_some() {}
        self.begun.retain(|_, (_, task)| !task.is_finished());
        if self.begun.len() < MOVES_AT_ONCE && !self.begun.contains_key(&change.shard) {
            let task = self.tasks.spawn(work);
            self.begun.insert(change.shard, (change, task));
        }
    }
}

impl Member {
    /// One move of those: [`Why::Balance`](plan::Why), [`Why::Drained`](plan::Why).
    pub(super) async fn give(&self, term: u64, change: &Change, settings: Option<Compare>) {
        let deadline = clock::now() + MOVE_WITHIN;
        self.have_warmed(change, deadline).await;
        if let Some(fence) = self.make(term, change, settings, deadline).await {
            // Nobody waits for it: the source has its whole time.
            self.have_left(change, fence, clock::now() + 2 * LEAVE_WITHIN).await;
        }
    }

    /// Gives a shard to a node, or with `dry_run` only says whether it would be given.
    ///
    /// # Errors
    /// InvalidArgument for what there is not; NotLeader; Unavailable without a quorum or when others change the route all the time.
    pub async fn move_shard(
        &self,
        shard: u32,
        node: &str,
        dry_run: bool,
        call: &Call,
    ) -> Result<v1::ShardMove, Failure> {
        validate_node(node).map_err(Failure::invalid)?;
        let mut warm = false;
        for _ in 0..=RACES {
            let (term, world) = self.known_world(call).await?;
            let refused = |why: String| Failure::new(Kind::InvalidArgument, why);
            let Some(change) = plan::asked(&world, shard, node).map_err(refused)? else {
                let fence = world.routes.get(&shard).map_or(0, |fenced| fenced.revision);
                return Ok(v1::ShardMove { shard, from: node.to_owned(), to: node.to_owned(), fence });
            };
            if dry_run {
                return Ok(told(&change, 0));
            }
            if !warm {
                self.have_warmed(&change, call.deadline).await;
                // That took a while: what is known is looked at again.
                warm = true;
                continue;
            }
            if let Some(fence) = self.change_route(term, &change, None, call).await? {
                self.have_left(&change, fence, call.deadline).await;
                return Ok(told(&change, fence));
            }
        }
        Err(self.raced(&format!("the route of shard {shard}")))
    }

    /// Moves shards until the workers have the same number of them, or with `dry_run` only says what would be moved.
    ///
    /// # Errors
    /// As [`Member::move_shard`], if none was moved. Otherwise those that were not, or of which nobody knows, are told with a fence of 0.
    pub async fn balance_shards(&self, dry_run: bool, call: &Call) -> Result<Vec<v1::ShardMove>, Failure> {
        let (term, world) = self.known_world(call).await?;
        let changes = plan::balance(&world);
        if dry_run {
            return Ok(changes.iter().map(|change| told(change, 0)).collect());
        }
        let moves = futures::stream::iter(changes)
            .map(|change| async move {
                self.have_warmed(&change, call.deadline).await;
                let fence = self.change_route(term, &change, None, call).await;
                if let Ok(Some(fence)) = &fence {
                    self.have_left(&change, *fence, call.deadline).await;
                }
                (change, fence)
            })
            .buffered(MOVES_AT_ONCE);
        balanced(moves.collect().await)
    }

    /// Has the node that is about to be given a shard read what it will need.
    pub(super) async fn have_warmed(&self, change: &Change, deadline: Instant) {
        reached_in(Point::Begin, WARM);
        let moving = Moving { shard: change.shard, fence: change.expected.unwrap_or(0) };
        self.tell_of_move(&change.route.node, WARM_SHARD, moving, WARM_WITHIN, deadline).await;
    }

    /// Has the node that a shard was taken from end what it does for it, which nobody would commit any more.
    pub(super) async fn have_left(&self, change: &Change, fence: Revision, deadline: Instant) {
        let Some(from) = change.from.as_ref().filter(|from| !from.is_empty() && **from != change.route.node) else {
            return;
        };
        self.tell_of_move(from, LEAVE_SHARD, Moving { shard: change.shard, fence }, LEAVE_WITHIN, deadline).await;
        reached_in(Point::Committed, LEAVE);
    }

    /// Tells a node, and waits for its answer.
    async fn tell_of_move(&self, node: &str, kind: &str, moving: Moving, within: Duration, deadline: Instant) {
        let now = clock::now();
        let until = now + within.min(deadline.saturating_duration_since(now) / 2);
        if let Err(why) = self.nodes.mailbox.ask(node, kind, moving.to_bytes(), until).await {
            tracing::info!(shard = moving.shard, kind, "a move goes on without an answer: {why}");
        }
    }
}

/// What came of several moves. That some failed does not hide those that were made.
fn balanced(moves: Vec<(Change, Result<Option<u64>, Failure>)>) -> Result<Vec<v1::ShardMove>, Failure> {
    let none = !moves.iter().any(|(_, fence)| matches!(fence, Ok(Some(_))));
    let moves = moves.into_iter().map(|(change, fence)| match fence {
        Err(failure) if none => Err(failure),
        fence => Ok(told(&change, fence.ok().flatten().unwrap_or(0))),
    });
    moves.collect()
}

fn told(change: &Change, fence: u64) -> v1::ShardMove {
    let from = change.from.clone().unwrap_or_default();
    v1::ShardMove { shard: change.shard, from, to: change.route.node.clone(), fence }
}

#[cfg(test)]
mod tests {
    use lake_client::shards::Route;

    use super::super::plan::Why;
    use super::*;

    fn change(shard: u32) -> Change {
        Change { shard, expected: None, from: None, route: Route::default(), why: Why::Balance }
    }

    #[tokio::test]
    async fn so_many_moves_are_under_way_and_each_once() {
        let mut under_way = UnderWay::default();
        let shards = || 0..2 * MOVES_AT_ONCE as u32;
        shards().for_each(|shard| under_way.begin(change(shard), std::future::pending()));
        let begun: Vec<u32> = under_way.moves().map(|change| change.shard).collect();
        assert_eq!(begun, shards().take(MOVES_AT_ONCE).collect::<Vec<_>>());
        // As one has ended another one has its place.
        let mut under_way = UnderWay::default();
        shards()
            .skip(1)
            .take(MOVES_AT_ONCE - 1)
            .for_each(|shard| under_way.begin(change(shard), std::future::pending()));
        under_way.begin(change(0), std::future::ready(()));
        while under_way.has(0) {
            tokio::task::yield_now().await;
        }
        shards().rev().take(2).for_each(|shard| under_way.begin(change(shard), std::future::pending()));
        assert_eq!(under_way.moves().count(), MOVES_AT_ONCE);
        assert!(!under_way.has(0) && under_way.has(shards().end - 1));
    }

    #[test]
    fn moves_that_were_made_are_told_also_if_others_failed() {
        let failed = || Err(Failure::unavailable("no".to_owned()));
        let moves = vec![(change(0), failed()), (change(1), Ok(Some(7))), (change(2), Ok(None))];
        let fences: Vec<u64> = balanced(moves).unwrap().iter().map(|moved| moved.fence).collect();
        assert_eq!(fences, [0, 7, 0]);
        assert!(balanced(vec![(change(0), Ok(None)), (change(1), failed())]).is_err());
        assert_eq!(balanced(vec![(change(0), Ok(None))]).unwrap().len(), 1);
    }
}
