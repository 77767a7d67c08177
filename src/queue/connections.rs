//! Where the queue's statements go: a pool, and what must be different when a transaction pooler (PgBouncer) stands
//! before Postgres.
//!
//! Behind one, two transactions of a connection may run on two servers, and a server serves other clients in between.
//! So nothing may stay on it: no session lock, no SET without LOCAL, no LISTEN, no temporary table, and no prepared
//! statement. The driver prepares every statement and then runs it, in two requests; the name it gives it ("sqlx_s_1")
//! is another client's name for another statement. There, every statement is an unnamed one, and runs within a
//! transaction: that keeps the server from the first request to the last. It costs up to three more round trips, and
//! works with every version and setting of the pooler.

use std::ops::{Deref, DerefMut};

use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt, TryStreamExt};
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgConnection, PgPool, PgQueryResult, PgRow, PgStatement, PgTypeInfo};
use sqlx::{Describe, Either, Error, Execute, Executor, Postgres, SqlStr};

macro_rules! by_id {
    () => {
        "BEGIN; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off; SET LOCAL enable_seqscan = off; \
         SET LOCAL plan_cache_mode = force_custom_plan"
    };
}
/// Begins a transaction whose statements find each row by its id. What Postgres knows of a growing table, and guesses
/// of an array's length, may else tell it to read the whole table instead. No such statement may give the table a
/// condition of its own (`status = 'running'` beside the join): when the statistics know of no such row, the table is
/// walked first, and the ids once more for each row of it. Within a CASE with the join's columns, it is not believed.
pub(super) const BY_ID: &str = by_id!();
/// As [`BY_ID`], and waits for no lock longer than this.
pub(super) const BY_ID_WAITING: &str = concat!(by_id!(), "; SET LOCAL lock_timeout = '200ms'");
/// Begins a transaction that waits for no turn longer than this. Its statements see all that was committed before
/// them, whatever the sessions' isolation.
pub(super) const TAKING_TURNS: &str = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL lock_timeout = '1s'";

type Step = Either<PgQueryResult, PgRow>;

/// The queue's connections. One statement: `.execute(&connections)`; several in a transaction:
/// [`Connections::begin`].
#[derive(Debug, Clone)]
pub(super) struct Connections {
    pool: PgPool,
    pooler: bool,
}

/// A transaction's connection. It hands statements to the server in the way that its pool needs.
#[derive(Debug)]
pub(super) struct Session {
    tx: sqlx::Transaction<'static, Postgres>,
    pooler: bool,
}

/// Rolled back when dropped.
#[derive(Debug)]
pub(super) struct Transaction(Session);

impl Connections {
    pub(super) fn new(pool: PgPool, pooler: bool) -> Self {
        Self { pool, pooler }
    }

    pub(super) fn pool(&self) -> &PgPool {
        &self.pool
    }

    pub(super) async fn begin(&self) -> sqlx::Result<Transaction> {
        Ok(Transaction(Session { tx: self.pool.begin().await?, pooler: self.pooler }))
    }

    /// A transaction that begins with statements of ours ([`BY_ID`]), in the same request.
    pub(super) async fn begin_with(&self, begin: &'static str) -> sqlx::Result<Transaction> {
        Ok(Transaction(Session { tx: self.pool.begin_with(begin).await?, pooler: self.pooler }))
    }

    /// In a transaction of its own, with all of its answer.
    async fn run_alone(self, statement: Once) -> sqlx::Result<Vec<Step>> {
        // Without arguments it goes as one request and leaves nothing.
        if statement.arguments.is_none() {
            return self.pool.fetch_many(statement).try_collect().await;
        }
        let mut tx = self.pool.begin().await?;
        let steps = tx.fetch_many(statement).try_collect().await?;
        tx.commit().await?;
        Ok(steps)
    }
}

impl Transaction {
    pub(super) async fn commit(self) -> sqlx::Result<()> {
        self.0.tx.commit().await
    }
}

impl Deref for Transaction {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.0
    }
}

impl DerefMut for Transaction {
    fn deref_mut(&mut self) -> &mut Session {
        &mut self.0
    }
}

/// A statement that is neither named nor kept.
struct Once {
    sql: SqlStr,
    arguments: Option<PgArguments>,
}

impl Once {
    fn new<'q>(mut statement: impl Execute<'q, Postgres>) -> sqlx::Result<Self> {
        let arguments = statement.take_arguments().map_err(Error::Encode)?;
        Ok(Self { sql: statement.sql(), arguments })
    }
}

impl Execute<'_, Postgres> for Once {
    fn sql(self) -> SqlStr {
        self.sql
    }

    fn statement(&self) -> Option<&PgStatement> {
        None
    }

    fn take_arguments(&mut self) -> Result<Option<PgArguments>, BoxDynError> {
        Ok(self.arguments.take())
    }

    fn persistent(&self) -> bool {
        false
    }
}

fn first_row(steps: Vec<Step>) -> Option<PgRow> {
    steps.into_iter().find_map(Either::right)
}

fn no_names<T>() -> sqlx::Result<T> {
    Err(Error::Protocol("a transaction pooler keeps no prepared statement".into()))
}

impl<'c> Executor<'c> for &'c Connections {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, sqlx::Result<Step>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        if !self.pooler {
            return self.pool.fetch_many(query);
        }
        let (connections, statement) = (self.clone(), Once::new(query));
        let steps = async move { Ok::<_, Error>(stream::iter(connections.run_alone(statement?).await?).map(Ok)) };
        stream::once(steps).try_flatten().boxed()
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        if !self.pooler {
            return self.pool.fetch_optional(query);
        }
        let (connections, statement) = (self.clone(), Once::new(query));
        Box::pin(async move { Ok(first_row(connections.run_alone(statement?).await?)) })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        if self.pooler { Box::pin(async { no_names() }) } else { self.pool.prepare_with(sql, parameters) }
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<Describe<Postgres>>>
    where
        'c: 'e,
    {
        if self.pooler { Box::pin(async { no_names() }) } else { self.pool.describe(sql) }
    }
}

impl<'c> Executor<'c> for &'c mut Session {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, sqlx::Result<Step>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let connection: &'c mut PgConnection = &mut self.tx;
        if !self.pooler {
            return connection.fetch_many(query);
        }
        match Once::new(query) {
            Ok(statement) => connection.fetch_many(statement),
            Err(error) => stream::iter([Err(error)]).boxed(),
        }
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, sqlx::Result<Option<PgRow>>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let connection: &'c mut PgConnection = &mut self.tx;
        if !self.pooler {
            return connection.fetch_optional(query);
        }
        match Once::new(query) {
            Ok(statement) => connection.fetch_optional(statement),
            Err(error) => Box::pin(async { Err(error) }),
        }
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, sqlx::Result<PgStatement>>
    where
        'c: 'e,
    {
        if self.pooler { Box::pin(async { no_names() }) } else { self.tx.prepare_with(sql, parameters) }
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, sqlx::Result<Describe<Postgres>>>
    where
        'c: 'e,
    {
        if self.pooler { Box::pin(async { no_names() }) } else { self.tx.describe(sql) }
    }
}
