//! The connection is cut at each request of each operation, until the operation ends without meeting the cut: what a
//! later version sends in addition is covered by itself.

use std::time::Duration;

use jobrequest::queue::{Channel, Listener, Queue, SchemaState, migrate};
use tokio::time::timeout;

use crate::db::{Database, settings};
use crate::operations::{Expected, MANY, OPERATIONS, Operation, prepare, repeat, stage, tables};
use crate::proxy::{Cut, Proxy};

/// How many requests it has.
async fn sweep(db: &Database, queue: &Queue, proxy: &Proxy, operation: &Operation, cut: Cut) -> usize {
    let expected = Expected::of(db, queue, operation).await;
    for request in 1..MANY {
        let what = format!("{}, cut {cut:?} request {request},", operation.name);
        let mut hand = prepare(db, queue, operation).await;
        // A connection of its own, where nothing is prepared yet.
        let through = Queue::new(proxy.options(db.queue_options()), settings(|_| {}));
        proxy.cut(cut, request);
        let tried = (operation.act)(&through, &mut hand).await;
        let was_cut = proxy.heal();
        let found = tables(db).await;
        let done = expected.is_done(&what, operation, &found);
        match tried {
            Ok(()) if done => {}
            Ok(()) => panic!("{what} claims to be done"),
            Err(error) => {
                assert!(was_cut, "{what}: {error}");
                assert!(error.is_passing(), "{what}: {error} is not said to pass");
                if !(done && operation.repeats_make_more) {
                    repeat(&through, operation, &mut hand, &what).await;
                    expected.must_be_done(&what, operation, &tables(db).await);
                }
            }
        }
        if !was_cut {
            return request - 1;
        }
    }
    panic!("{}: more than {MANY} requests", operation.name);
}

async fn sweep_all(cut: Cut) {
    let db = stage().await;
    let queue = db.queue();
    let proxy = Proxy::before(&db.queue_options()).await;
    for operation in OPERATIONS {
        let requests = sweep(&db, &queue, &proxy, operation, cut).await;
        assert!(requests >= 1, "{}: nothing was cut", operation.name);
    }
}

#[tokio::test]
async fn an_operation_whose_request_is_lost_is_not_done_and_its_repeat_does_it_once() {
    sweep_all(Cut::Before).await;
}

#[tokio::test]
async fn an_operation_whose_reply_is_lost_is_done_whole_or_not_at_all_and_its_repeat_does_it_once() {
    sweep_all(Cut::After).await;
}

#[tokio::test]
async fn a_migration_that_is_cut_anywhere_goes_on_where_it_stopped() {
    let db = Database::empty().await;
    let proxy = Proxy::before(&db.options()).await;
    for cut in [Cut::Before, Cut::After] {
        for request in 1..MANY {
            db.run("DROP SCHEMA public CASCADE; CREATE SCHEMA public").await;
            proxy.cut(cut, request);
            let tried = migrate(&proxy.options(db.options())).await;
            let was_cut = proxy.heal();
            if let Err(error) = tried {
                assert!(was_cut && error.is_passing(), "cut {cut:?} request {request}: {error}");
                migrate(&db.options()).await.unwrap_or_else(|error| panic!("cut {cut:?} request {request}: {error}"));
            }
            assert_eq!(db.queue().schema_state().await.expect("answered"), SchemaState::Current);
            db.queue().enqueue(&crate::db::job()).await.expect("the tables are whole");
            if !was_cut {
                assert!(request > 3);
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_notification_that_gets_nowhere_does_not_silence_those_after_it() {
    let db = Database::new().await;
    let proxy = Proxy::before(&db.queue_options()).await;
    let limit = Duration::from_secs(1);
    let through = Queue::new(proxy.options(db.queue_options()), settings(|settings| settings.time_limit = limit));
    let listener = Listener::spawn(db.options(), &[Channel::Ready]);
    let woken = || timeout(Duration::from_secs(20), listener.woken(Channel::Ready));
    woken().await.expect("it listens");
    proxy.swallow(b"NOTIFY jobrequest_ready");
    through.enqueue(&crate::db::job()).await.expect("answered");
    assert!(timeout(limit / 2, woken()).await.is_err(), "swallowed");
    through.enqueue(&crate::db::job()).await.expect("answered");
    woken().await.expect("the next one is sent");
}
