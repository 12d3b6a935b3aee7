use lake_proto::kv::Condition;
use proptest::prelude::*;

use super::*;

fn worker(lease: LeaseId) -> Worker {
    Worker {
        lease: Some(lease),
        remaining: Duration::from_secs(8),
        heard_for: Some(Duration::from_secs(60)),
        suspicion: Some(0.1),
        ..Worker::default()
    }
}

/// So many shards, and workers a, b, ... with the leases 1, 2, ...
fn world(shards: u32, workers: usize) -> World {
    let names = ["a", "b", "c", "d", "e"];
    World {
        settings: Settings { shards, maintenance: false },
        routes: BTreeMap::new(),
        alive: BTreeSet::new(),
        workers: names.iter().take(workers).zip(1..).map(|(name, lease)| ((*name).to_owned(), worker(lease))).collect(),
        warm: true,
        followers: 1,
        selector: Selector::Load,
    }
}

impl World {
    /// As the map is after these changes.
    fn apply(&mut self, changes: &[Change]) {
        for change in changes {
            assert_eq!(change.expected, self.routes.get(&change.shard).map(|fenced| fenced.revision));
            let revision = self.routes.values().map(|fenced| fenced.revision).max().unwrap_or(100) + 1;
            self.routes.insert(change.shard, Fenced { route: change.route.clone(), revision });
        }
        self.look();
    }

    fn look(&mut self) {
        let alive = |fenced: &Fenced| {
            self.workers.get(&fenced.route.node).is_some_and(|worker| worker.lease == Some(fenced.route.lease))
        };
        self.alive = self.routes.iter().filter(|(_, fenced)| alive(fenced)).map(|(shard, _)| *shard).collect();
    }

    fn settled(mut self) -> Self {
        loop {
            let changes = plan(&self, 16, &mut 0);
            if changes.is_empty() {
                return self;
            }
            self.apply(&changes);
        }
    }

    fn led(&self) -> Vec<usize> {
        let led = |node: &String| self.routes.values().filter(|fenced| fenced.route.node == *node).count();
        self.workers.keys().map(led).collect()
    }

    /// Its lease ends, and it is silent.
    fn lose(&mut self, node: &str) {
        let lost = self.workers.get_mut(node).unwrap();
        (lost.lease, lost.suspicion) = (None, Some(THRESHOLD + 1.0));
        self.look();
    }
}

#[test]
fn shards_are_spread_and_then_stay() {
    let world = world(64, 3).settled();
    assert_eq!(world.led().iter().sum::<usize>(), 64);
    assert!(world.led().iter().all(|led| (21..=22).contains(led)), "{:?}", world.led());
    for fenced in world.routes.values() {
        assert_eq!(fenced.route.followers.len(), 1);
        assert_ne!(fenced.route.followers[0], fenced.route.node);
    }
    assert!(plan(&world, 16, &mut 0).is_empty());
}

#[test]
fn nothing_is_taken_from_a_node_before_its_lease_has_ended() {
    let mut world = world(8, 2).settled();
    world.workers.get_mut("b").unwrap().suspicion = Some(1000.0);
    assert_eq!(plan(&world, 16, &mut 0), [], "it is silent, but its lease lives");
    world.workers.get_mut("b").unwrap().lease = None;
    world.workers.get_mut("b").unwrap().suspicion = Some(THRESHOLD - 1.0);
    world.look();
    assert_eq!(plan(&world, 16, &mut 0), [], "its lease has ended, but it may come back at any moment");
    world.lose("b");
    let lost = plan(&world, 16, &mut 0);
    assert_eq!(lost.len(), 4);
    assert!(lost.iter().all(|change| change.route.node == "a" && change.route.lease == 1 && change.why == Why::Lost));
    // A new leader has not had the time to hear it.
    world.warm = false;
    assert!(plan(&world, 16, &mut 0).is_empty());
    // That it has left is in the map.
    world.workers.remove("b");
    world.look();
    assert!(plan(&world, 16, &mut 0).iter().all(|change| change.why == Why::Left));
    assert_eq!(plan(&world, 3, &mut 0).len(), 3, "and not more at once than may be");
}

#[test]
fn what_is_no_route_is_replaced_by_one() {
    let mut world = world(2, 2).settled();
    world.routes.insert(1, Fenced { route: Route::default(), revision: 999 });
    world.look();
    let changes = plan(&world, 16, &mut 0);
    let given: Vec<_> = changes.iter().map(|change| (change.shard, change.expected, change.why)).collect();
    assert_eq!(given, [(1, Some(999), Why::Begins)]);
    assert_ne!(changes[0].route.node, "");
    assert!(!changes[0].route.followers.contains(&String::new()));
}

#[test]
fn a_node_that_comes_back_keeps_its_shards_under_its_new_lease() {
    let mut world = world(8, 2).settled();
    world.workers.get_mut("b").unwrap().lease = Some(9);
    world.look();
    for maintenance in [false, true] {
        world.settings.maintenance = maintenance;
        let back = plan(&world, 16, &mut 0);
        assert_eq!(back.len(), 4);
        assert!(back.iter().all(|change| change.route.node == "b" && change.route.lease == 9));
    }
    world.workers.get_mut("b").unwrap().heard_for = None;
    assert_eq!(plan(&world, 16, &mut 0), [], "this leader has not heard it yet");
}

#[test]
fn followers_come_first_when_a_node_is_lost() {
    let mut world = world(16, 4).settled();
    let before = world.routes.clone();
    world.lose("c");
    let lost = plan(&world, 16, &mut 0);
    assert_eq!(lost.len(), 4);
    for change in &lost {
        assert_eq!(change.route.node, before[&change.shard].route.followers[0]);
        assert!(!change.route.followers.contains(&"c".to_owned()) && change.route.followers.len() == 1);
    }
    world.apply(&lost);
    let world = world.settled();
    assert!(world.routes.values().all(|fenced| fenced.route.nodes().all(|node| node != "c")));
}

#[test]
fn a_cluster_without_workers_keeps_its_routes() {
    let mut world = world(4, 1).settled();
    assert!(world.routes.values().all(|fenced| fenced.route.followers.is_empty()), "there is nobody else");
    world.lose("a");
    assert!(plan(&world, 16, &mut 0).is_empty());
    assert_eq!(plan(&self::world(4, 0), 16, &mut 0), []);
}

#[test]
fn a_worker_that_is_new_gets_its_part_once_it_has_been_heard_for_a_while() {
    let mut world = world(64, 2).settled();
    let new = Worker { heard_for: Some(Duration::from_secs(1)), ..worker(3) };
    world.workers.insert("c".into(), new);
    assert!(plan(&world, 16, &mut 0).is_empty());
    // Whoever asks for it does not wait.
    assert_eq!(balance(&world).len(), 21);
    world.workers.get_mut("c").unwrap().heard_for = Some(SETTLED);
    world.settings.maintenance = true;
    assert_eq!(plan(&world, 16, &mut 0), [], "nothing by itself in maintenance mode");
    assert_eq!(balance(&world).len(), 21);
    world.settings.maintenance = false;
    let world = world.settled();
    assert!(world.led().iter().all(|led| (21..=22).contains(led)), "{:?}", world.led());
    assert_eq!(balance(&world), []);
}

#[test]
fn moves_that_are_under_way_count_as_made() {
    let mut world = world(16, 1).settled();
    world.workers.insert("b".to_owned(), worker(2));
    let begun = plan(&world, 4, &mut 0);
    assert!(
        begun.len() == 4 && begun.iter().all(|change| world.gives(change) && change.route.node == "b"),
        "{begun:?}"
    );
    let mut lost = world.clone();
    world.expect(&begun);
    let more = plan(&world, 16, &mut 0);
    assert!(
        more.len() == 4 && more.iter().all(|change| change.why == Why::Balance),
        "half of them are b's then: {more:?}"
    );
    assert!(!more.iter().any(|change| begun.iter().any(|begun| begun.shard == change.shard)));
    // Who is lost meanwhile is found all the same.
    lost.lose("a");
    lost.expect(&begun);
    let lost = plan(&lost, 16, &mut 0);
    assert!(lost.len() == 16 && lost.iter().all(|change| change.route.node == "b"), "{lost:?}");
    // What has been changed since is as it is.
    let mut since = world.clone();
    let fenced = since.routes.get_mut(&begun[0].shard).unwrap();
    *fenced = Fenced { route: Route { node: "a".to_owned(), lease: 1, ..Route::default() }, revision: 999 };
    since.expect(&begun);
    assert_eq!(since.routes[&begun[0].shard].route.node, "a");
}

#[test]
fn a_small_difference_is_not_worth_a_move() {
    let mut world = world(10, 2).settled();
    let moved = asked(&world, world.routes.iter().find(|(_, f)| f.route.node == "a").map(|(s, _)| *s).unwrap(), "b");
    world.apply(&[moved.unwrap().unwrap()]);
    assert_eq!(world.led(), [4, 6]);
    assert_eq!(plan(&world, 9, &mut 0), []);
    assert_eq!(balance(&world).len(), 1);
}

#[test]
fn a_move_that_is_asked_for_says_why_it_cannot_be() {
    let mut world = world(4, 2).settled();
    let shard = world.routes.iter().find(|(_, fenced)| fenced.route.node == "a").map(|(shard, _)| *shard).unwrap();
    assert_eq!(asked(&world, shard, "a"), Ok(None), "it has it");
    assert!(asked(&world, 4, "a").unwrap_err().contains("0 to 3"));
    assert!(asked(&world, shard, "z").unwrap_err().contains("no node z"));
    world.settings.maintenance = true;
    let change = asked(&world, shard, "b").unwrap().unwrap();
    assert_eq!((change.from.as_deref(), change.route.node.as_str(), change.why), (Some("a"), "b", Why::Asked));
    assert_eq!(change.route.followers, ["a"], "who had it follows");
    world.workers.get_mut("b").unwrap().suspicion = Some(THRESHOLD + 1.0);
    assert!(asked(&world, shard, "b").unwrap_err().contains("not heard"));
}

#[test]
fn a_change_is_one_transaction_on_the_old_route_for_a_lease_that_lives_in_the_leaders_term() {
    let world = world(1, 1);
    let first = &plan(&world, 1, &mut 0)[0];
    let txn = first.txn(7);
    let conditions: Vec<_> = txn.when.iter().map(|compare| compare.condition.clone()).collect();
    assert_eq!(conditions, [Condition::Absent, Condition::LeaseAlive(1), Condition::EntryTerm(7)]);
    assert_eq!(txn.validate(), Ok(()));
    let next = Change { expected: Some(5), ..first.clone() }.txn(7);
    assert_eq!(next.when[0].condition, Condition::ModRevision(5));
    assert_eq!(next.validate(), Ok(()));
}

/// What may happen to a worker between two looks.
#[derive(Debug, Clone, Copy)]
enum Event {
    Lost,
    Late,
    Left,
    Back,
    Asleep,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![Just(Event::Lost), Just(Event::Late), Just(Event::Left), Just(Event::Back), Just(Event::Asleep),]
}

proptest! {
    /// Whatever happens: a route whose lease lives is changed only for balance or its followers, every change is for a worker that
    /// is fit, and once there is peace each shard has a leader that lives, and the workers differ little.
    #[test]
    fn every_plan_is_for_workers_that_live_and_ends(
        shards in 1_u32..40,
        events in proptest::collection::vec((0_usize..5, event()), 0..40),
        selector in prop_oneof![Just(Selector::RoundRobin), Just(Selector::Lease), Just(Selector::Load)],
    ) {
        let mut world = World { selector, ..world(shards, 5) };
        let (mut lease, mut turn) = (100, 0);
        for (which, event) in events.into_iter().chain((0..5).map(|which| (which, Event::Back))) {
            let name = ["a", "b", "c", "d", "e"][which];
            match event {
                Event::Lost if world.workers.contains_key(name) => world.lose(name),
                Event::Late | Event::Asleep if world.workers.contains_key(name) => {
                    let late = world.workers.get_mut(name).unwrap();
                    late.suspicion = Some(if matches!(event, Event::Late) { 5.0 } else { 100.0 });
                }
                Event::Left => drop(world.workers.remove(name)),
                Event::Lost | Event::Late | Event::Asleep => {}
                Event::Back => {
                    lease += 1;
                    world.workers.insert(name.into(), worker(lease));
                }
            }
            world.look();
            let changes = plan(&world, 8, &mut turn);
            prop_assert!(changes.len() <= 8);
            let shards: BTreeSet<u32> = changes.iter().map(|change| change.shard).collect();
            prop_assert_eq!(shards.len(), changes.len(), "a shard is changed once");
            for change in &changes {
                prop_assert!(!change.route.followers.contains(&change.route.node));
                match change.why {
                    Why::Balance | Why::Followers => prop_assert!(world.alive.contains(&change.shard)),
                    _ => prop_assert!(!world.alive.contains(&change.shard)),
                }
                if change.why != Why::Followers {
                    prop_assert_eq!(world.workers[&change.route.node].fit(), Some(change.route.lease));
                }
            }
            world.apply(&changes);
        }
        let mut looks = 0;
        loop {
            let changes = plan(&world, 8, &mut turn);
            if changes.is_empty() {
                break;
            }
            world.apply(&changes);
            looks += 1;
            prop_assert!(looks < 100, "it never ends: {changes:?}");
        }
        prop_assert_eq!(world.alive.len(), world.settings.shards as usize);
        let led = world.led();
        let (most, fewest) = (led.iter().max().unwrap(), led.iter().min().unwrap());
        prop_assert!(most - fewest <= (shards as usize / 5 / 4).max(2), "{led:?}");
    }
}

#[test]
fn a_node_that_is_drained_gives_all_and_gets_nothing() {
    let mut world = world(12, 3).settled();
    world.workers.get_mut("b").unwrap().drained = true;
    let changes = plan(&world, 16, &mut 0);
    assert!(!changes.is_empty() && changes.iter().all(|change| change.why == Why::Drained && change.route.node != "b"));
    assert!(changes.iter().all(|change| world.gives(change)), "it lives, and others are made ready");
    // Not while nothing is to be moved.
    let kept = World { settings: Settings { maintenance: true, ..world.settings }, ..world.clone() };
    assert!(plan(&kept, 16, &mut 0).is_empty());
    let mut world = world.settled();
    assert_eq!(world.led(), [6, 0, 6]);
    assert!(world.routes.values().all(|fenced| !fenced.route.followers.contains(&"b".to_owned())));
    assert!(asked(&world, 0, "b").unwrap_err().contains("drained"));
    // Restarted, it is so still; and one that has come back with another lease gets nothing either.
    world.workers.get_mut("b").unwrap().lease = Some(9);
    assert!(plan(&world, 16, &mut 0).is_empty());
    world.workers.get_mut("b").unwrap().drained = false;
    assert_eq!(world.settled().led(), [4, 4, 4]);

    // What it had when its lease ended goes to others, as soon as it is heard of again.
    let mut world = self::world(4, 2).settled();
    let drained = world.workers.get_mut("b").unwrap();
    (drained.drained, drained.lease) = (true, Some(9));
    world.look();
    let changes = plan(&world, 16, &mut 0);
    let moved: Vec<_> = changes.iter().filter(|change| change.why == Why::Drained).collect();
    assert_eq!(moved.len(), 2, "{changes:?}");
    assert!(!moved.iter().any(|change| world.gives(change)), "nobody has them, and nothing is waited for");
    assert_eq!(world.settled().led(), [4, 0]);

    // With nobody else it keeps what it has.
    let mut world = self::world(4, 1).settled();
    world.workers.get_mut("a").unwrap().drained = true;
    assert!(plan(&world, 16, &mut 0).is_empty());
    // Also when it is started again; once somebody else is there, that one has it.
    world.workers.get_mut("a").unwrap().lease = Some(9);
    world.look();
    let changes = plan(&world, 16, &mut 0);
    assert!(changes.len() == 4 && changes.iter().all(|change| change.why == Why::Returned && change.route.lease == 9));
    world.apply(&changes);
    assert!(plan(&world, 16, &mut 0).is_empty());
    // Where nothing is to be moved, too.
    world.workers.insert("b".to_owned(), worker(2));
    let mut kept = World { settings: Settings { maintenance: true, ..world.settings }, ..world.clone() };
    kept.workers.get_mut("a").unwrap().lease = Some(11);
    kept.look();
    assert_eq!(kept.settled().led(), [4, 0]);
    world.workers.get_mut("a").unwrap().lease = Some(13);
    world.look();
    assert_eq!(world.settled().led(), [0, 4]);
}
