//! What is measured, in which order, how often.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::bars::{self, Results, Verdict};
use crate::contenders::{Contender, GRAPHILE, GRAPHILE_DEFAULT, GRAPHILE_FOUR, OURS, RIVER, SEED};
use crate::database::{Load, Server};
use crate::drain::drain;
use crate::idle::idle;
use crate::small::{bulk, enqueue, start_latency};
use crate::{figures, ours};

/// How much of it.
struct Size {
    rounds: usize,
    /// Of the drain.
    jobs: u64,
    /// Of the queues that take one job at a time.
    seed_jobs: u64,
    /// Of the drains by several processes.
    shared_jobs: u64,
    small_rounds: usize,
    enqueued: u64,
    latencies: u64,
    idle: Duration,
}

const FULL: Size = Size {
    rounds: 5,
    jobs: 500_000,
    seed_jobs: 20_000,
    shared_jobs: 200_000,
    small_rounds: 3,
    enqueued: 20_000,
    latencies: 400,
    idle: Duration::from_secs(30),
};

const QUICK: Size = Size {
    rounds: 2,
    jobs: 100_000,
    seed_jobs: 10_000,
    shared_jobs: 100_000,
    small_rounds: 1,
    enqueued: 8_000,
    latencies: 100,
    idle: Duration::from_secs(10),
};

pub async fn run() -> Outcome<ExitCode> {
    let quick = match std::env::var("BENCH").as_deref() {
        Err(_) | Ok("full" | "") => false,
        Ok("quick") => true,
        Ok(other) => return Err(format!("BENCH: {other} is neither quick nor full").into()),
    };
    let only = std::env::var("BENCH_ONLY").unwrap_or_default();
    let wanted = |part: &str| only.is_empty() || only.split(',').any(|word| word == part);
    let size = if quick { &QUICK } else { &FULL };
    let server = Server::from_environment()?;
    let began = Instant::now();
    let machine = figures::Machine::look(&server).await?;
    eprintln!("the worker's settings, for every bar: {}", ours::settings());
    let mut run = Run { server, size, results: Results::default() };
    if wanted("drain") {
        run.drains().await?;
    }
    if wanted("one") {
        run.one_at_a_time().await?;
    }
    if wanted("processes") {
        run.processes().await?;
    }
    if wanted("enqueue") {
        run.enqueues().await?;
    }
    if wanted("latency") {
        run.latencies().await?;
    }
    if wanted("idle") {
        run.idle().await?;
    }
    let bars = bars::bars(&run.results);
    figures::print(&run.results, &bars);
    println!("\ntook {} s", began.elapsed().as_secs());
    if only.is_empty() {
        figures::write(&machine, &run.results, &bars, quick)?;
    }
    let missed = bars.iter().any(|bar| bar.verdict() == Verdict::Miss);
    Ok(if missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

struct Run {
    server: Server,
    size: &'static Size,
    results: Results,
}

const RATE: &str = "jobs/s";

impl Run {
    fn add(&mut self, what: &'static str, who: &str, unit: &'static str, value: f64) {
        eprintln!("  {what}: {who}: {value:.1} {unit}");
        self.results.add(what, who, unit, value);
    }

    async fn drain(&mut self, what: &'static str, name: &str, who: &Contender, load: Load, how: &str) -> Outcome<()> {
        let drained = drain(&self.server, who, load, how, 1).await?;
        eprintln!("    CPU of its process: {:.2} us a job", drained.worker_cpu);
        self.add(what, name, RATE, drained.jobs_per_second);
        Ok(())
    }

    async fn drains(&mut self) -> Outcome<()> {
        let plain = Load::Plain(self.size.jobs);
        let bare = "our claim + finish without a worker, 2 connections, batches of 1000";
        for _ in 0..self.size.rounds {
            self.drain(bars::DRAIN, OURS.name, &OURS, plain, "drain").await?;
            self.drain(bars::DRAIN, GRAPHILE.name, &GRAPHILE, plain, "drain").await?;
            self.drain(bars::DRAIN, GRAPHILE_FOUR.name, &GRAPHILE_FOUR, plain, "drain").await?;
            self.drain(bars::DRAIN, RIVER.name, &RIVER, plain, "drain").await?;
            self.drain(bars::DRAIN, bare, &OURS, plain, "bare").await?;
            let rows = Load::Controller(self.size.jobs);
            self.drain(bars::DRAIN_CONTROLLER, OURS.name, &OURS, rows, "drain").await?;
        }
        Ok(())
    }

    async fn one_at_a_time(&mut self) -> Outcome<()> {
        let load = Load::Plain(self.size.seed_jobs);
        for _ in 0..self.size.rounds {
            self.drain(bars::ONE, OURS.name, &OURS, load, "one").await?;
            self.drain(bars::ONE, SEED.name, &SEED, load, "drain").await?;
        }
        Ok(())
    }

    async fn processes(&mut self) -> Outcome<()> {
        for _ in 0..self.size.small_rounds {
            for processes in [1, 2, 4, 8] {
                let load = Load::Plain(self.size.shared_jobs);
                let drained = drain(&self.server, &OURS, load, "drain", processes).await?;
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
                let rate = bulk(&self.server, who, how, self.size.jobs, 1000).await?;
                self.add(bars::BULK, name, RATE, rate);
            }
        }
        Ok(())
    }

    async fn latencies(&mut self) -> Outcome<()> {
        for _ in 0..self.size.small_rounds {
            for who in [&OURS, &GRAPHILE, &GRAPHILE_FOUR, &GRAPHILE_DEFAULT, &RIVER] {
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
}
