//! The report: a table, JSON, a plot, and docs/figures.md made from them.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde::Serialize;
use serde_json::json;

use crate::bars::{Bar, DRAIN, Results};
use crate::database::Server;
use crate::plan::Size;
use crate::{Outcome, ours, svg};

/// Where the figures come from.
#[derive(Serialize)]
pub struct Machine {
    /// Of the queue: its version, its sources, how it was compiled.
    pub build: String,
    cpu: String,
    cores: usize,
    memory_gib: u64,
    postgres: String,
    shared_buffers: String,
    /// Of one minute, before the first measurement: above 0.5 something else ran.
    pub load_before: f64,
}

impl Machine {
    pub async fn look(server: &Server) -> Outcome<Self> {
        let mut connection = server.connect("postgres").await?;
        let (postgres, shared_buffers): (String, String) =
            sqlx::query_as("SELECT current_setting('server_version'), current_setting('shared_buffers')")
                .fetch_one(&mut connection)
                .await?;
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let after_colon = |text: String, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name)).map(str::to_owned);
            line.and_then(|line| line.split_once(':').map(|(_, value)| value.trim().to_owned())).unwrap_or_default()
        };
        let kib: u64 =
            after_colon(read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse().unwrap_or_default();
        let machine = Self {
            build: build(),
            cpu: after_colon(read("/proc/cpuinfo"), "model name"),
            cores: std::thread::available_parallelism()?.get(),
            memory_gib: kib.div_ceil(1024 * 1024),
            postgres,
            shared_buffers,
            load_before: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or_default(),
        };
        if machine.load_before > 0.5 {
            eprintln!("NOTE: the machine is not idle (load {}): these figures are provisional", machine.load_before);
        }
        Ok(machine)
    }
}

fn build() -> String {
    let git =
        Command::new("git").args(["describe", "--always", "--dirty"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let sources = git.ok().filter(|said| said.status.success()).and_then(|said| String::from_utf8(said.stdout).ok());
    let profile = if cfg!(debug_assertions) { "DEBUG" } else { "release" };
    format!("{} at {}, {profile}", env!("CARGO_PKG_VERSION"), sources.as_deref().map_or("sources unknown", str::trim))
}

pub fn print(results: &Results, bars: &[Bar]) {
    println!("\n{}", measured(results));
    println!("{}", judged(bars));
}

/// Every series: least, median, most, and the median against ours.
fn measured(results: &Results) -> String {
    let mut text =
        "| measured | who | min | median | max | unit | of ours |\n|---|---|--:|--:|--:|---|--:|\n".to_owned();
    for series in &results.series {
        let Some((min, median, max)) = series.spread() else { continue };
        let ours =
            results.of(series.what).find(|other| other.who.starts_with("jobrequest")).and_then(|own| own.spread());
        let share = ours.map_or_else(|| "-".to_owned(), |(_, own, _)| format!("{:.2}", median / own));
        let (min, median, max) = (number(min), number(median), number(max));
        _ = writeln!(
            text,
            "| {} | {} | {min} | {median} | {max} | {} | {share} |",
            series.what, series.who, series.unit
        );
    }
    text
}

fn judged(bars: &[Bar]) -> String {
    let mut text = "| bar | asked | reached | |\n|---|---|--:|---|\n".to_owned();
    for bar in bars {
        _ = writeln!(text, "| {} | {} | {} | {} |", bar.what, bar.limit(), bar.reached(), bar.verdict().as_str());
    }
    text
}

/// Thousands are separated; small ones keep two places.
fn number(value: f64) -> String {
    if value < 1000.0 {
        return format!("{value:.2}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A full run's figures go into docs/, a quick one's into target/.
pub fn write(machine: &Machine, size: &Size, results: &Results, bars: &[Bar]) -> Outcome<()> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let docs = root.join(if size.whole { "docs" } else { "target/bench" });
    let figures = docs.join("figures");
    fs::create_dir_all(&figures)?;
    let verdicts: Vec<_> = bars
        .iter()
        .map(|bar| {
            json!({
                "bar": bar.what, "asked": bar.limit(), "reached": bar.value, "verdict": bar.verdict().as_str(),
            })
        })
        .collect();
    let whole = json!({
        "machine": machine, "worker": ours::settings(), "size": size,
        "series": results.series, "bars": verdicts,
    });
    fs::write(figures.join("queue.json"), format!("{whole:#}\n"))?;
    fs::write(
        figures.join("queue.svg"),
        svg::bars("No-op jobs drained, a second", &results.of(DRAIN).collect::<Vec<_>>()),
    )?;
    let Machine { build, cpu, cores, memory_gib, postgres, shared_buffers, load_before } = machine;
    let page = format!(
        "# Figures\n\n\
        Written by `make bench`; not edited. One run ({}), interleaved rounds, durable commits, one Postgres {postgres} \
        (shared_buffers {shared_buffers}, otherwise its defaults) that shares {cores} cores ({cpu}) and {memory_gib} GiB \
        with the queue that is measured; load before the run {load_before}. Only ratios within a run count.\n\n\
        ![Jobs drained a second](figures/queue.svg)\n\n\
        ## Bars\n\n{}\n## Measured\n\n{}\n\
        The build, for every bar: {build}. The worker's settings, for every bar: `{}`. Size of the run: `{}`.\n\n\
        Drains count from the worker's start to the last finish committed, \
        seen from another connection. Start latency counts from before the enqueue's call to the executor's start.\n",
        size.name,
        judged(bars),
        measured(results),
        ours::settings(),
        serde_json::to_string(size)?,
    );
    fs::write(docs.join("figures.md"), page)?;
    eprintln!("written: {}", docs.join("figures.md").display());
    Ok(())
}
