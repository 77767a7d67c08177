use chrono::DateTime;
use uuid::Uuid;

use super::*;

const MS: Duration = Duration::from_millis(1);

fn mark(n: i64) -> Mark {
    Mark { run_at: DateTime::from_timestamp(n, 0).expect("a time"), id: Uuid::nil() }
}

fn lane(namespace: &str, priority: i16) -> Lane {
    Lane { kind: "a".to_owned(), namespace: namespace.to_owned(), careful: false, priority }
}

fn freed(kind: usize) -> Freed {
    Freed { kind, took: Some(MS), alone: false, away: false }
}

/// A desk whose kinds are known to take so long.
fn known(slots: usize, kinds: usize, took: Duration) -> Desk<u32> {
    let mut desk = Desk::new(slots, kinds, 1, true);
    for kind in &mut desk.kinds {
        (0..100).for_each(|_| kind.pace.ended(took));
    }
    desk
}

/// A runner that comes new: what it is given.
fn comes(desk: &mut Desk<u32>) -> Option<u32> {
    desk.at_desk += 1;
    desk.turn(None).job
}

#[test]
fn the_highest_priority_goes_first_then_the_place_in_the_lane_and_namespaces_take_turns() {
    let mut desk = known(100, 1, MS);
    for (job, namespace, priority, at) in
        [(1, "x", 0, 2), (2, "x", 0, 1), (3, "x", 7, 9), (4, "y", -5, 1), (5, "y", -5, 2)]
    {
        desk.put_ahead(0, &lane(namespace, priority), mark(at), job);
    }
    let order: Vec<_> = std::iter::from_fn(|| comes(&mut desk)).collect();
    assert_eq!(order, [3, 4, 2, 5, 1]);
}

#[test]
fn one_kind_never_takes_the_slots_that_the_others_need() {
    let mut desk = known(8, 2, MS);
    for job in 0..20 {
        desk.put_ahead(0, &lane("x", 0), mark(job.into()), job);
    }
    let started = std::iter::from_fn(|| comes(&mut desk)).count();
    assert_eq!(started, 7);
    assert_eq!(desk.room(20).kinds[1].free, 7);
    desk.put_ahead(1, &lane("x", 0), mark(1), 100);
    assert_eq!(comes(&mut desk), Some(100), "the other kind has its slot at once");
}

#[test]
fn nothing_is_prefetched_of_a_kind_that_is_new_or_slow() {
    let mut new: Desk<u32> = Desk::new(32, 1, 1, true);
    for desk in [&mut new, &mut known(32, 1, 500 * MS)] {
        let Room { free, kinds, total } = desk.room(0);
        assert_eq!((free, kinds[0], total), (32, KindRoom { free: 32, ahead: false, rows: 0 }, BATCH));
    }
    let mut fast = known(32, 1, 20 * MS);
    let rows = fast.room(0).kinds[0].rows;
    assert!((180..=200).contains(&rows), "{rows}: the slots, and a tenth of a second's work");
    let mut one_by_one: Desk<u32> = Desk::new(32, 1, 1, false);
    (0..100).for_each(|_| one_by_one.kinds[0].pace.ended(MS));
    assert!(!one_by_one.room(0).kinds[0].ahead);
}

#[test]
fn what_the_worker_holds_is_bounded_and_a_claim_waits_until_it_is_worth_it() {
    let mut desk = known(32, 1, MS / 100);
    assert_eq!(desk.room(0).total, 1000);
    assert_eq!(desk.room(AHEAD_ROWS + 32).total, 0, "a slow database is not buried under ends");
    for job in 0..1500 {
        desk.put_ahead(0, &lane("x", 0), mark(job.into()), job);
    }
    let Room { kinds, total, .. } = desk.room(1600);
    assert_eq!((kinds[0].rows, total), (0, 432), "only what needs a slot is worth so small a claim");
    assert_eq!(desk.room(1500).kinds[0].rows, 0, "the buffer is not low");
}

#[test]
fn a_job_that_lost_two_leases_starts_once_nothing_is_prefetched_and_nothing_is_prefetched_before_it_ends() {
    let mut desk = known(4, 1, MS);
    desk.put_ahead(0, &lane("x", 0), mark(1), 1);
    assert_eq!(desk.set_aside(0, 1), 1);
    desk.put_ready(0, true, 2);
    assert!(!desk.room(2).kinds[0].ahead);
    assert_eq!(comes(&mut desk), Some(1));
    assert_eq!(comes(&mut desk), Some(2));
    assert!(!desk.room(2).kinds[0].ahead, "it is under way");
    desk.turn(Some(Freed { alone: true, ..freed(0) }));
    assert!(desk.room(1).kinds[0].ahead);
}

#[test]
fn a_slot_set_aside_is_nobody_elses_until_it_is_given_up() {
    let mut desk = known(2, 1, MS);
    assert_eq!(desk.set_aside(0, 5), 2);
    desk.put_ahead(0, &lane("x", 0), mark(1), 1);
    assert_eq!(comes(&mut desk), None);
    desk.give_up(0, 1);
    assert_eq!(comes(&mut desk), Some(1));
    desk.put_ready(0, false, 2);
    assert_eq!(comes(&mut desk), Some(2));
    assert_eq!(desk.room(2).free, 0);
}

#[test]
fn jobs_that_need_a_free_slot_get_one_of_eight_that_come_free() {
    let mut desk = known(1, 1, MS);
    for job in 0..20 {
        desk.put_ahead(0, &lane("x", 0), mark(job.into()), job);
    }
    assert_eq!(comes(&mut desk), Some(0));
    desk.planned(true, false);
    let before = (1..20).take_while(|_| desk.turn(Some(freed(0))).job.is_some()).count();
    assert_eq!(before, 7);
    assert_eq!(desk.room(13).free, 1);
    assert_eq!(desk.set_aside(0, 1), 1);
}

#[test]
fn runners_are_called_while_jobs_wait_and_threads_are_free() {
    let mut desk: Desk<u32> = Desk::new(10, 1, 2, true);
    assert!(!desk.calls(), "nothing waits");
    assert_eq!(desk.set_aside(0, 4), 4);
    (0..4).for_each(|job| desk.put_ready(0, false, job));
    assert!(desk.calls());
    let turn = desk.turn(None);
    assert!(turn.job.is_some() && turn.call, "one for each thread");
    let turn = desk.turn(None);
    assert!(turn.job.is_some() && !turn.call);
    assert!(desk.away(), "its job waits for something: another runner takes its place");
    assert!(desk.turn(None).job.is_some());
    assert!(desk.turn(Some(Freed { away: true, ..freed(0) })).job.is_some());
    assert!(!desk.away() && desk.turn(Some(freed(0))).job.is_none(), "nothing waits any more");
}

#[test]
fn room_is_told_of_once_until_it_has_been_looked_at() {
    let mut desk = known(2, 1, 500 * MS);
    assert_eq!(desk.set_aside(0, 2), 2);
    (0..2).for_each(|job| desk.put_ready(0, false, job));
    desk.planned(true, false);
    assert!(comes(&mut desk).is_some() && comes(&mut desk).is_some());
    assert!(desk.turn(Some(freed(0))).hungry);
    assert!(!desk.turn(Some(freed(0))).hungry);
    desk.planned(false, true);
    assert_eq!(desk.set_aside(0, 1), 1);
    desk.put_ready(0, false, 3);
    comes(&mut desk);
    assert!(!desk.turn(Some(freed(0))).hungry, "nothing is due anywhere");
}

#[test]
fn a_closed_desk_gives_everything_back_and_starts_nothing() {
    let mut desk = known(4, 1, MS);
    assert_eq!(desk.set_aside(0, 2), 2);
    desk.put_ready(0, false, 1);
    desk.put_ready(0, true, 2);
    desk.put_ahead(0, &lane("x", 0), mark(1), 3);
    let mut waited = desk.close();
    waited.sort_unstable();
    assert_eq!((waited, comes(&mut desk), desk.room(0).total), (vec![1, 2, 3], None, 0));
}

#[test]
fn what_waits_can_be_taken_back_one_by_one() {
    let mut desk = known(4, 1, MS);
    for job in 0..6 {
        desk.put_ahead(0, &lane(if job < 3 { "x" } else { "y" }, 0), mark(job.into()), job);
    }
    assert_eq!(desk.withdraw(|job| job % 2 == 0 || *job < 3), [0, 1, 2, 4]);
    let mut left: Vec<_> = std::iter::from_fn(|| comes(&mut desk)).collect();
    left.sort_unstable();
    assert_eq!(left, [3, 5]);
}

#[test]
fn slots_left_for_a_plan_that_does_not_need_them_go_back_to_what_waits() {
    let mut desk = known(1, 1, MS / 100);
    for job in 0..1600 {
        desk.put_ahead(0, &lane("x", 0), mark(job.into()), job);
    }
    assert_eq!(comes(&mut desk), Some(0));
    desk.planned(true, false);
    while desk.turn(Some(freed(0))).job.is_some() {}
    assert!(!desk.calls(), "the only slot is left for a plan");
    desk.planned(false, false);
    assert!(desk.calls());
}

#[test]
fn a_job_that_waits_to_be_alone_starts_when_what_waited_ahead_is_taken_back() {
    let mut desk = known(1, 1, MS);
    desk.put_ahead(0, &lane("x", 0), mark(1), 1);
    assert_eq!(desk.set_aside(0, 1), 1);
    desk.put_ready(0, true, 2);
    assert!(!desk.calls());
    assert_eq!(desk.withdraw(|_| true), [1]);
    assert!(desk.calls());
    assert_eq!(desk.turn(None).job, Some(2));
}
