//! The test is shown to have teeth: each guard of `guards.rs`, taken out of its statement on the way to Postgres, makes
//! a sequence of operations end otherwise than the rules say.
//!
//! A proxy stands between the queues and Postgres and rewrites the Parse messages that hold the guard's words. First all
//! guards stay in place for some cases: these must pass, and show all statements. A guard whose words are in none of
//! them fails the test, and so does one without which the statement is not valid SQL. Then each guard is taken out, and
//! the case of its seed must fail.
//!
//! Who changes a statement changes its words in `guards.rs`. Who changes the generator or the steps' order finds other
//! seeds: with `JOBREQUEST_TEST_TEETH=search` up to `PROPTEST_CASES` (2,000) cases are tried for each guard that the seed
//! in `guards.rs` does not miss or that has none, and the test fails unless each is missed; the seeds that it prints
//! belong into `guards.rs`.
//!
//! Not here: guards against what two sessions do at once (row locks, `SKIP LOCKED`, a look repeated in a transaction), as
//! steps follow one another; and what is a faster way to what an index or a trigger of the table refuses anyway (the
//! looks for a key's holder and for the resource's row in `enqueue`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use sqlx::postgres::types::Oid;
use sqlx::postgres::{PgConnectOptions, PgSslMode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use crate::database::Lab;
use crate::guards::GUARDS;
use crate::{Bench, cases, in_threads};

/// What is taken out of a statement.
#[derive(Debug, Clone, Copy)]
pub struct Guard {
    /// The seed of a case that misses it; none if it takes too long to find one in every run.
    pub missed_by: Option<u64>,
    /// Words that only its statement has, or those that repeat it.
    pub of: &'static str,
    pub words: &'static str,
    /// What stands there instead.
    pub instead: &'static str,
}

impl Guard {
    /// The statement without it, if it has it.
    fn out_of(self, sql: &str) -> Option<String> {
        let Self { of, words, instead, .. } = self;
        (sql.contains(of) && sql.contains(words)).then(|| sql.replace(words, instead))
    }
}

/// The queue's statements, and the types of their arguments.
type Statements = BTreeMap<String, Vec<Oid>>;

/// After so many cases all statements have been met.
const CASES_WITH_ALL_STATEMENTS: u64 = 300;

/// How often the case of a seed is tried.
const TRIES: usize = 5;

#[test]
fn each_guard_that_is_taken_out_of_a_statement_is_missed() {
    let statements = all_statements();
    let searches = std::env::var("JOBREQUEST_TEST_TEETH").is_ok_and(|value| value == "search");
    let (next, unmissed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    in_threads(|| {
        let mut bench = Bench::with(Lab::with_saboteur());
        while let Some(guard) = GUARDS.get(next.fetch_add(1, Ordering::SeqCst)) {
            bench.check_that_it_is_sql_without(*guard, &statements);
            let seeds: Vec<u64> = match guard.missed_by {
                // The back-off's jitter is no part of a seed.
                Some(seed) if searches => [seed; TRIES].into_iter().chain(0..cases()).collect(),
                Some(seed) => vec![seed; TRIES],
                None if searches => (0..cases()).collect(),
                None => continue,
            };
            bench.take_out(*guard);
            match seeds.into_iter().find(|seed| bench.failure_of(*seed, Duration::ZERO).is_some()) {
                Some(seed) if searches => eprintln!("missed by the case of seed {seed}: {guard:?}"),
                Some(_) => {}
                None => unmissed.lock().expect("not poisoned").push(*guard),
            }
        }
    });
    let unmissed = unmissed.into_inner().expect("not poisoned");
    assert!(unmissed.is_empty(), "not missed; see the head of this file for how to look for seeds: {unmissed:#?}");
}

/// All statements that a guard is in, when all are in place.
fn all_statements() -> Statements {
    let unknown = |statements: &Statements| {
        let is_known = |guard: &&Guard| statements.keys().any(|sql| guard.out_of(sql).is_some());
        GUARDS.iter().filter(|guard| !is_known(guard)).collect::<Vec<_>>()
    };
    let mut bench = Bench::with(Lab::with_saboteur());
    for seed in 0..CASES_WITH_ALL_STATEMENTS {
        if let Some(why) = bench.failure_of(seed, Duration::ZERO) {
            panic!("with all guards in place: {why}");
        }
        let statements = bench.lab().saboteur().statements();
        if unknown(&statements).is_empty() {
            return statements;
        }
    }
    panic!("no statement has these words: {:#?}", unknown(&bench.lab().saboteur().statements()));
}

impl Bench {
    fn take_out(&mut self, guard: Guard) {
        let _runtime = self.runtime.enter();
        self.lab.as_mut().expect("it is there until the end").take_out(guard);
    }

    /// An error of syntax would be missed too, and say nothing.
    fn check_that_it_is_sql_without(&self, guard: Guard, statements: &Statements) {
        for (sql, types) in statements {
            let Some(without) = guard.out_of(sql) else { continue };
            if let Err(error) = self.runtime.block_on(self.lab().prepares(&without, types)) {
                panic!("what is left of the statement is none: {error}: {guard:#?}");
            }
        }
    }
}

/// Stands before a Postgres and takes words out of the statements that pass.
pub struct Saboteur {
    server: PgConnectOptions,
    plan: Arc<Plan>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Plan {
    guard: Mutex<Option<Guard>>,
    /// As they came.
    statements: Mutex<Statements>,
}

impl Saboteur {
    pub async fn before(server: &PgConnectOptions) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let target = (server.get_host().to_owned(), server.get_port());
        let plan = Arc::<Plan>::default();
        let wanted = Arc::clone(&plan);
        let task = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (target, plan) = (target.clone(), Arc::clone(&wanted));
                tokio::spawn(async move {
                    let Ok(server) = TcpStream::connect(target).await else { return };
                    // A request is several small messages.
                    _ = (client.set_nodelay(true), server.set_nodelay(true));
                    let (client, mut to_client) = client.into_split();
                    let (mut from_server, server) = server.into_split();
                    tokio::select! {
                        _ = requests(client, server, &plan) => {}
                        _ = tokio::io::copy(&mut from_server, &mut to_client) => {}
                    }
                });
            }
        });
        let server = server.clone().host(&address.ip().to_string()).port(address.port()).ssl_mode(PgSslMode::Disable);
        Self { server, plan, task }
    }

    /// The same database by way of this.
    pub fn options(&self) -> PgConnectOptions {
        self.server.clone()
    }

    /// Statements that are prepared from now on lack this.
    pub fn take_out(&self, guard: Guard) {
        *self.plan.guard.lock().expect("not poisoned") = Some(guard);
    }

    /// All that have passed, as they came.
    pub fn statements(&self) -> Statements {
        self.plan.statements.lock().expect("not poisoned").clone()
    }
}

impl Drop for Saboteur {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// A message is a letter, its length with the four bytes of that, and the rest; the first one has no letter.
async fn requests(mut client: OwnedReadHalf, mut server: OwnedWriteHalf, plan: &Plan) -> std::io::Result<()> {
    let length = client.read_u32().await?;
    let mut rest = vec![0; length as usize - 4];
    client.read_exact(&mut rest).await?;
    server.write_all(&[&length.to_be_bytes(), rest.as_slice()].concat()).await?;
    loop {
        let (letter, length) = (client.read_u8().await?, client.read_u32().await?);
        let mut rest = vec![0; length as usize - 4];
        client.read_exact(&mut rest).await?;
        if letter == b'P' {
            rest = parse(plan, rest);
        }
        let length = u32::try_from(rest.len() + 4).expect("a statement is short");
        server.write_all(&[&[letter], &length.to_be_bytes()[..], rest.as_slice()].concat()).await?;
    }
}

/// Parse: the statement's name, its text, and how many types its arguments have, and which.
fn parse(plan: &Plan, message: Vec<u8>) -> Vec<u8> {
    let mut parts = message.splitn(3, |byte| *byte == 0);
    let (Some(name), Some(text), Some(types)) = (parts.next(), parts.next(), parts.next()) else { return message };
    let text = std::str::from_utf8(text).expect("the queue's SQL is text");
    let oids = types[2..].chunks_exact(4).map(|oid| Oid(u32::from_be_bytes(oid.try_into().expect("four bytes"))));
    plan.statements.lock().expect("not poisoned").insert(text.to_owned(), oids.collect());
    let guard = *plan.guard.lock().expect("not poisoned");
    let without = guard.and_then(|guard| guard.out_of(text));
    [name, b"\0", without.as_deref().unwrap_or(text).as_bytes(), b"\0", types].concat()
}
