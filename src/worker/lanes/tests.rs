use chrono::DateTime;
use uuid::Uuid;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn mark(n: i64) -> Mark {
    Mark { run_at: DateTime::from_timestamp(n, 0).expect("a time"), id: Uuid::nil() }
}

fn lane(kind: &str, namespace: &str, priority: i16) -> Lane {
    Lane { kind: kind.to_owned(), namespace: namespace.to_owned(), careful: false, priority }
}

fn head(lane: Lane, at: i64) -> LaneHead {
    LaneHead { lane, mark: mark(at), due_in: Duration::ZERO }
}

/// Room for `rows` prefetched jobs of each of `kinds` kinds, and for `free` in slots.
fn room(kinds: usize, free: usize, rows: usize) -> Room {
    Room { free, kinds: vec![KindRoom { free, ahead: rows > 0, rows }; kinds], total: 1000 }
}

fn asked(plan: &Plan) -> Vec<(&str, i16, usize)> {
    plan.asks.iter().map(|ask| (ask.want.lane.namespace.as_str(), ask.want.lane.priority, ask.want.limit)).collect()
}

/// What each ask gave.
fn gave(plan: &Plan, counts: &[usize], at: i64) -> Vec<(usize, Option<Mark>)> {
    assert_eq!(plan.asks.len(), counts.len());
    counts.iter().map(|count| (*count, (*count > 0).then(|| mark(at)))).collect()
}

fn directory(heads: Vec<LaneHead>) -> (Directory, Instant) {
    let (mut directory, now) = (Directory::new(&["a", "b"]), Instant::now());
    assert!(directory.surveyed(heads, 100, now));
    (directory, now)
}

#[tokio::test]
async fn a_claim_asks_the_highest_lane_of_each_group_and_groups_share_its_room() {
    let heads = vec![head(lane("a", "x", -1), 1), head(lane("a", "x", 5), 2), head(lane("a", "y", 0), 3)];
    let (mut directory, now) = directory(heads);
    let plan = directory.plan(now, room(2, 4, 1000));
    assert_eq!(asked(&plan), [("x", 5, 500), ("y", 0, 500)]);
    directory.claimed(&plan.asks, &gave(&plan, &[3, 500], 9), now);
    let plan = directory.plan(now, room(2, 4, 1000));
    assert_eq!(asked(&plan), [("x", -1, 500), ("y", 0, 500)], "the higher lane of x is empty");
    assert_eq!(plan.asks[1].want.from, Some(mark(9)), "what was taken is not looked at again");
}

#[tokio::test]
async fn of_a_thousand_namespaces_each_has_its_turn_before_most_have_two() {
    let names: Vec<String> = (0..1000).map(|n| format!("ns-{n:04}")).collect();
    let mut directory = Directory::new(&["a"]);
    let now = Instant::now();
    assert!(directory.surveyed(names.iter().map(|name| head(lane("a", name, 0), 1)).collect(), 2000, now));
    let mut seen = HashMap::<String, usize>::new();
    for _ in 0..18 {
        let plan = directory.plan(now, Room { total: 64, ..room(1, 64, 0) });
        let full: Vec<_> = plan.asks.iter().map(|ask| (ask.want.limit, Some(mark(2)))).collect();
        directory.claimed(&plan.asks, &full, now);
        for ask in plan.asks {
            *seen.entry(ask.want.lane.namespace).or_default() += ask.want.limit;
        }
    }
    assert_eq!(seen.len(), 1000);
    let again = seen.values().filter(|count| **count > 1).count();
    assert!(again < 200, "{again} had more than one");
}

#[tokio::test]
async fn a_flood_leaves_the_other_its_share() {
    let (mut directory, now) = directory(vec![head(lane("a", "flood", 0), 1), head(lane("a", "z", 0), 1)]);
    for _ in 0..10 {
        let plan = directory.plan(now, Room { total: 2, ..room(2, 2, 0) });
        assert_eq!(asked(&plan).iter().filter(|(namespace, ..)| *namespace == "z").count(), 1, "{plan:?}");
        directory.claimed(&plan.asks, &gave(&plan, &[1, 1], 2), now);
    }
}

#[tokio::test]
async fn careful_jobs_are_asked_for_only_into_free_slots() {
    let careful = Lane { careful: true, ..lane("a", "x", 9) };
    let (mut directory, now) = directory(vec![head(lane("a", "x", 0), 1), head(careful.clone(), 1)]);
    let plan = directory.plan(now, room(2, 3, 100));
    assert_eq!((asked(&plan), plan.asks[0].into_slots), (vec![("x", 9, 3)], true), "no more than there are slots");
    let plan = directory.plan(now, room(2, 0, 100));
    assert_eq!((asked(&plan), plan.asks[0].into_slots), (vec![("x", 0, 100)], false), "others don't wait for it");
    let plan = directory.plan(now, room(2, 0, 0));
    assert!(plan.asks.is_empty() && !plan.starved, "a kind without a slot of its own waits for those of its own");
    let mut full = room(2, 0, 100);
    full.kinds.iter_mut().for_each(|kind| (kind.free, kind.rows) = (1, 0));
    let plan = directory.plan(now, full);
    assert!(plan.asks.is_empty() && plan.starved);
}

#[tokio::test]
async fn a_drained_lane_sleeps_until_a_survey_shows_it_or_a_notification_comes() {
    let (mut directory, now) = directory(vec![head(lane("a", "x", 0), 1)]);
    let plan = directory.plan(now, room(2, 4, 10));
    directory.claimed(&plan.asks, &gave(&plan, &[2], 5), now);
    assert!(directory.plan(now, room(2, 4, 10)).asks.is_empty());
    assert!(directory.is_asleep());
    directory.notified();
    let plan = directory.plan(now, room(2, 4, 10));
    assert_eq!(plan.asks[0].want.from, Some(mark(5)));
    directory.claimed(&plan.asks, &gave(&plan, &[0], 5), now);
    // Committed late, or dated back: it lies before what was taken.
    assert!(directory.surveyed(vec![head(lane("a", "x", 0), 3)], 100, now));
    assert_eq!(directory.plan(now, room(2, 4, 10)).asks[0].want.from, Some(mark(3)));
}

#[tokio::test]
async fn a_claim_that_was_on_its_way_does_not_undo_what_a_survey_found() {
    let (mut directory, now) = directory(vec![head(lane("a", "x", 0), 10)]);
    let plan = directory.plan(now, room(2, 4, 10));
    assert!(directory.surveyed(vec![head(lane("a", "x", 0), 3)], 100, now));
    directory.claimed(&plan.asks, &gave(&plan, &[10], 20), now);
    assert_eq!(directory.plan(now, room(2, 4, 10)).asks[0].want.from, Some(mark(3)));
}

#[tokio::test]
async fn a_lane_whose_first_job_is_due_later_sleeps_until_then() {
    let later = LaneHead { due_in: SECOND, ..head(lane("a", "x", 0), 1) };
    let (mut directory, now) = directory(vec![later]);
    assert!(directory.plan(now, room(2, 4, 10)).asks.is_empty());
    assert_eq!(directory.wake_at(), Some(now + SECOND));
    assert_eq!(directory.plan(now + SECOND, room(2, 4, 10)).asks.len(), 1);
    assert_eq!(directory.wake_at(), None);
}

#[tokio::test]
async fn a_survey_goes_on_behind_its_last_lane_and_forgets_what_it_no_longer_finds() {
    let (mut directory, now) = (Directory::new(&["a", "b"]), Instant::now());
    assert!(!directory.surveyed(vec![head(lane("a", "x", 0), 1), head(lane("a", "y", 0), 1)], 2, now));
    let from = directory.survey_from();
    assert_eq!((&from[0].after, &from[1].after), (&Some(lane("a", "y", 0)), &None));
    assert!(directory.surveyed(vec![head(lane("a", "z", 0), 1)], 2, now));
    assert_eq!(directory.survey_from()[0].after, None);
    assert!(directory.surveyed(vec![head(lane("a", "y", 0), 1)], 2, now));
    assert_eq!(asked(&directory.plan(now, room(2, 9, 9))), [("y", 0, 9)]);
    assert_eq!(directory.kinds[0].groups.len(), 1);
}

#[tokio::test]
async fn a_full_kind_leaves_the_claim_to_the_other() {
    let (mut directory, now) = directory(vec![head(lane("a", "x", 0), 1), head(lane("b", "x", 0), 1)]);
    let mut room = room(2, 5, 0);
    room.kinds[0].free = 0;
    let plan = directory.plan(now, room);
    assert_eq!((plan.asks.len(), plan.asks[0].want.lane.kind.as_str(), plan.asks[0].want.limit), (1, "b", 5));
}

#[tokio::test]
async fn groups_share_a_room_that_is_smaller_than_the_claim_and_what_one_kind_leaves_goes_to_the_other() {
    let heads = vec![head(lane("a", "x", 0), 1), head(lane("a", "y", 0), 1), head(lane("b", "z", 0), 1)];
    let (mut directory, now) = directory(heads);
    let mut room = room(2, 0, 80);
    room.kinds[1].rows = 10_000;
    let plan = directory.plan(now, room);
    let mut asked = asked(&plan);
    asked.sort_unstable();
    assert_eq!(asked, [("x", 0, 40), ("y", 0, 40), ("z", 0, 920)]);
}

#[tokio::test]
async fn a_namespace_that_wakes_does_not_wait_for_a_whole_round_of_the_others() {
    let busy = |n: i32| head(lane("a", &format!("ns-{n}"), 0), 1);
    let mut directory = Directory::new(&["a"]);
    let now = Instant::now();
    assert!(directory.surveyed((0..1000).map(busy).collect(), 2000, now));
    let take = |directory: &mut Directory| {
        let plan = directory.plan(now, Room { total: 64, ..room(1, 0, 64) });
        let full: Vec<_> = plan.asks.iter().map(|ask| (ask.want.limit, Some(mark(2)))).collect();
        directory.claimed(&plan.asks, &full, now);
        plan
    };
    (0..20).for_each(|_| drop(take(&mut directory)));
    let heads = (0..1000).map(busy).chain([head(lane("a", "quiet", 0), 1)]).collect();
    assert!(directory.surveyed(heads, 2000, now));
    let plan = take(&mut directory);
    let mut asked: Vec<_> = asked(&plan).into_iter().map(|(namespace, ..)| namespace).collect();
    assert!(asked.contains(&"quiet"), "{asked:?}");
    asked.sort_unstable();
    asked.dedup();
    assert_eq!(asked.len(), 64, "nobody is asked twice");
}
