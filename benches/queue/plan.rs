//! What is measured, in which order, how often.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::bars::{self, Results, Verdict};
use crate::behind::behind;
use crate::claim::{self, costs};
use crate::contenders::{Contender, GRAPHILE, GRAPHILE_DEFAULT, GRAPHILE_FOUR, OURS, RIVER, SEED};
use crate::database::Server;
use crate::drain::{Meanwhile, drain, drain_in};
use crate::held::held;
use crate::idle::idle;
use crate::load::Load;
use crate::ours::{self, CONCURRENCY, FEW_SLOTS};
use crate::row::row;
use crate::small::{bulk, enqueue, start_latency};
use crate::{Outcome, figures};

/// How much of it.
#[derive(Serialize)]
pub struct Size {
    pub name: &'static str,
    /// What the bars ask for.
    pub whole: bool,
    rounds: usize,
    /// Of the drain.
    jobs: u64,
    /// Of what is measured beside the peers and the plain drain.
    small_rounds: usize,
    /// Of the queues that take one job at a time; the seed crate is preloaded by 16 connections, each with as many.
    seed_jobs: u64,
    /// Of the drains by several processes.
    shared_jobs: u64,
    enqueued: u64,
    latencies: u64,
    idle: Duration,
    /// Of the drains under a held snapshot.
    held_jobs: u64,
    /// How long a backlog is held, with all slots of the settings and with few.
    behind: (Duration, Duration),
    claim: claim::Size,
    large_jobs: u64,
    row_jobs: u64,
    row_retention: Duration,
}

const FULL: Size = Size {
    name: "full",
    whole: true,
    rounds: 5,
    jobs: 500_000,
    small_rounds: 3,
    seed_jobs: 20_000,
    shared_jobs: 200_000,
    enqueued: 10_000,
    latencies: 200,
    idle: Duration::from_secs(20),
    held_jobs: 300_000,
    behind: (Duration::from_secs(60), Duration::from_secs(15)),
    claim: claim::Size { claims: 100, ended: 5_000_000, later: 1_000_000, others: 100_000 },
    large_jobs: 100_000,
    row_jobs: 5_000_000,
    row_retention: Duration::from_secs(10),
};

const QUICK: Size = Size {
    name: "quick: fewer rounds and rows than the bars ask for",
    whole: false,
    rounds: 2,
    jobs: 100_000,
    small_rounds: 1,
    seed_jobs: 4_800,
    shared_jobs: 50_000,
    enqueued: 4_000,
    latencies: 60,
    idle: Duration::from_secs(8),
    held_jobs: 60_000,
    behind: (Duration::from_secs(6), Duration::from_secs(4)),
    claim: claim::Size { claims: 40, ended: 300_000, later: 100_000, others: 10_000 },
    large_jobs: 10_000,
    row_jobs: 300_000,
    row_retention: Duration::from_secs(1),
};

pub async fn run() -> Outcome<ExitCode> {
    let size = match std::env::var("BENCH").as_deref() {
        Err(_) | Ok("full" | "") => &FULL,
        Ok("quick") => &QUICK,
        Ok(other) => return Err(format!("BENCH: {other} is neither quick nor full").into()),
    };
    let only = std::env::var("BENCH_ONLY").unwrap_or_default();
    let server = Server::from_environment()?;
    let began = Instant::now();
    let machine = figures::Machine::look(&server).await?;
    println!("build, for every bar: {}", machine.build);
    println!("the worker's settings, for every bar: {}", ours::settings());
    println!("size: {}", serde_json::to_string(size)?);
    let mut run = Run { server, size, results: Results::default() };
    for part in PARTS {
        if only.is_empty() || only.split(',').any(|word| word == part) {
            let began = Instant::now();
            run.part(part).await.map_err(|error| format!("{part}: {error}"))?;
            eprintln!("  ({part} took {} s)", began.elapsed().as_secs());
        }
    }
    let bars = bars::bars(&run.results);
    figures::print(&run.results, &bars);
    println!("\n{}; took {} s; load before {}", size.name, began.elapsed().as_secs(), machine.load_before);
    if only.is_empty() {
        figures::write(&machine, size, &run.results, &bars)?;
    }
    let missed = bars.iter().any(|bar| bar.verdict() == Verdict::Miss);
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// As BENCH_ONLY names them.
const PARTS: [&str; 11] =
    ["drain", "one", "processes", "enqueue", "latency", "idle", "held", "behind", "claim", "memory", "row"];

struct Run {
    server: Server,
    size: &'static Size,
    results: Results,
}

const RATE: &str = "jobs/s";

impl Run {
    async fn part(&mut self, part: &str) -> Outcome<()> {
        match part {
            "drain" => self.drains().await,
            "one" => self.one_at_a_time().await,
            "processes" => self.processes().await,
            "enqueue" => self.enqueues().await,
            "latency" => self.latencies().await,
            "idle" => self.idle().await,
            "held" => self.held().await,
            "behind" => self.behind().await,
            "claim" => self.claims().await,
            "memory" => self.memory().await,
            "row" => self.row().await,
            other => Err(format!("there is no part {other}").into()),
        }
    }

    fn add(&mut self, what: &'static str, who: &str, unit: &'static str, value: f64) {
        eprintln!("  {what}: {who}: {value:.2} {unit}");
        self.results.add(what, who, unit, value);
    }

    async fn drain(&mut self, what: &'static str, name: &str, who: &Contender, load: Load, how: &str) -> Outcome<()> {
        let drained = drain(&self.server, who, load, &[how], 1).await?;
        eprintln!("    CPU of its process: {:.2} us a job", drained.worker_cpu);
        self.add(what, name, RATE, drained.jobs_per_second);
        Ok(())
    }

    async fn drains(&mut self) -> Outcome<()> {
        let plain = Load::Plain(self.size.jobs);
        let bare = "our claim + finish without a worker, 2 connections, batches of 1000";
        for round in 0..self.size.rounds {
            self.drain(bars::DRAIN, OURS.name, &OURS, plain, "drain").await?;
            self.drain(bars::DRAIN, GRAPHILE.name, &GRAPHILE, plain, "drain").await?;
            self.drain(bars::DRAIN, GRAPHILE_FOUR.name, &GRAPHILE_FOUR, plain, "drain").await?;
            self.drain(bars::DRAIN, RIVER.name, &RIVER, plain, "drain").await?;
            if round < self.size.small_rounds {
                self.drain(bars::DRAIN, bare, &OURS, plain, "bare").await?;
            }
            let rows = Load::Controller(self.size.jobs);
            self.drain(bars::DRAIN_CONTROLLER, OURS.name, &OURS, rows, "drain").await?;
        }
        Ok(())
    }

    async fn one_at_a_time(&mut self) -> Outcome<()> {
        let load = Load::Plain(self.size.seed_jobs);
        for _ in 0..self.size.small_rounds {
            self.drain(bars::ONE, OURS.name, &OURS, load, "one").await?;
            self.drain(bars::ONE, SEED.name, &SEED, load, "drain").await?;
        }
        Ok(())
    }

    async fn processes(&mut self) -> Outcome<()> {
        for _ in 0..self.size.small_rounds {
            for processes in [1, 2, 4, 8] {
                let load = Load::Plain(self.size.shared_jobs);
                let drained = drain(&self.server, &OURS, load, &["drain"], processes).await?;
                self.add(bars::PROCESSES, &format!("{}, {processes}", OURS.name), RATE, drained.jobs_per_second);
            }
        }
        Ok(())
    }

    async fn enqueues(&mut self) -> Outcome<()> {
        for _ in 0..self.size.small_rounds {
            for who in [&OURS, &GRAPHILE, &RIVER, &SEED] {
                let rate = enqueue(&self.server, who, self.size.enqueued).await?;
                self.add(bars::ENQUEUE, who.name, RATE, rate);
            }
            for (who, how, name) in
                [(&OURS, "bulk", OURS.name), (&OURS, "insert", bars::BARE_INSERT), (&RIVER, "bulk", RIVER.name)]
            {
                let rate = bulk(&self.server, who, how, self.size.shared_jobs, 1000).await?;
                self.add(bars::BULK, name, RATE, rate);
            }
        }
        Ok(())
    }

    async fn latencies(&mut self) -> Outcome<()> {
        for round in 0..self.size.small_rounds {
            let once: &[&Contender] = if round == 0 { &[&GRAPHILE_DEFAULT, &RIVER] } else { &[] };
            for who in [&OURS, &GRAPHILE, &GRAPHILE_FOUR].iter().chain(once) {
                let (p50, p99) = start_latency(&self.server, who, self.size.latencies).await?;
                self.add(bars::P50, who.name, "ms", p50);
                self.add(bars::P99, who.name, "ms", p99);
            }
        }
        Ok(())
    }

    async fn idle(&mut self) -> Outcome<()> {
        let idle = idle(&self.server, &OURS, self.size.idle).await?;
        self.add(bars::IDLE_QUERIES, OURS.name, "queries/s", idle.queries_per_second);
        self.add(bars::IDLE_RSS, OURS.name, "MiB", idle.rss_mib);
        self.add(bars::IDLE_CPU, OURS.name, "% of a core", idle.cpu_percent);
        Ok(())
    }

    async fn held(&mut self) -> Outcome<()> {
        for _ in 0..self.size.small_rounds {
            let held = held(&self.server, self.size.held_jobs).await?;
            self.add(bars::HELD_RATE, bars::FREE, RATE, held.free);
            self.add(bars::HELD_RATE, bars::HELD, RATE, held.held);
            self.add(bars::HELD_PACE, OURS.name, "x", held.last_to_first);
            self.add(bars::HELD_SHARE, OURS.name, "x", held.held / held.free);
            self.add(bars::HELD_LATE, "back-dated", "s", held.back_dated.as_secs_f64());
            self.add(bars::HELD_LATE, "committed late", "s", held.committed_late.as_secs_f64());
        }
        Ok(())
    }

    async fn behind(&mut self) -> Outcome<()> {
        let (long, short) = self.size.behind;
        for (slots, time) in [(CONCURRENCY, long), (FEW_SLOTS, short)] {
            let found = behind(&self.server, slots, time).await?;
            let who = format!("{}, {slots} slots", OURS.name);
            let (rate, least) = (found.jobs_per_second, found.least_backlog);
            eprintln!("    {rate:.0} jobs/s; the backlog was never under {least} jobs");
            self.add(bars::HIGHER_P50, &who, "ms", found.p50_ms);
            self.add(bars::HIGHER_P99, &who, "ms", found.p99_ms);
            self.add(bars::HIGHER_BUSY, &who, "%", found.busy_percent);
        }
        Ok(())
    }

    async fn claims(&mut self) -> Outcome<()> {
        for (who, costs) in [bars::ALONE, bars::AMONG].into_iter().zip(costs(&self.server, &self.size.claim).await?) {
            self.add(bars::CLAIM_PLACE, who, "ms", costs.by_place);
            self.add(bars::CLAIM_UNKNOWING, who, "ms", costs.unknowing);
            self.add(bars::SURVEY, who, "ms", costs.survey);
        }
        Ok(())
    }

    async fn memory(&mut self) -> Outcome<()> {
        let load = Load::Large(self.size.large_jobs);
        let database = self.server.once(&OURS, load).await?;
        let slots = FEW_SLOTS.to_string();
        let how = ["drain", &slots];
        let drained = drain_in(&self.server, &OURS, &database, load, &how, 1, Meanwhile::default()).await?;
        self.server.drop(&database).await?;
        eprintln!("    at {:.0} jobs/s", drained.jobs_per_second);
        self.add(bars::LARGE_RSS, OURS.name, "MiB", drained.peak_mib);
        Ok(())
    }

    async fn row(&mut self) -> Outcome<()> {
        let row = row(&self.server, self.size.row_jobs, self.size.row_retention).await?;
        self.add(bars::ROW, OURS.name, RATE, row.jobs_per_second);
        eprintln!("    retention removed {} jobs meanwhile", row.purged);
        for (fifth, stand) in bars::FIFTHS.into_iter().zip(row.fifths) {
            eprintln!("    after the {fifth} fifth the table has {:.0} MiB", stand.table_mib);
            self.add(bars::ROW_SPACE, fifth, "MiB", stand.dead_and_free_mib);
            self.add(bars::ROW_INDEXES, fifth, "MiB", stand.indexes_mib);
            self.add(bars::ROW_CLAIM, fifth, "ms", stand.claim_p99_ms);
        }
        Ok(())
    }
}
