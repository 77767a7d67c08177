//! A queue's process, as the benchmark sees it.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use crate::Outcome;
use crate::contenders::Contender;

/// How long a process may take to say the next thing that is waited for.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long it has to end by itself.
const GRACE: Duration = Duration::from_secs(10);

pub struct Child {
    process: std::process::Child,
    input: Option<ChildStdin>,
    done: Arc<AtomicU64>,
    lines: Receiver<String>,
}

impl Child {
    pub fn start(contender: &Contender, command: &[&str], database: &str) -> Outcome<Self> {
        let program = contender.program()?;
        let mut process = Command::new(&program)
            .args(contender.arguments)
            .args(command)
            .env("DATABASE_URL", database)
            .envs(contender.environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("{}: {error}", program.display()))?;
        let (input, output) = (process.stdin.take(), process.stdout.take().ok_or("no output")?);
        let (said, lines) = channel();
        let done = Arc::new(AtomicU64::new(0));
        let heard = done.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                match line.strip_prefix("done ").and_then(|count| count.parse().ok()) {
                    Some(count) => heard.store(count, Ordering::Release),
                    // Nobody listens any more.
                    None => drop(said.send(line)),
                }
            }
        });
        Ok(Self { process, input, done, lines })
    }

    /// Waits until it is ready to go.
    pub fn ready(&self) -> Outcome<()> {
        self.line("ready").map(drop)
    }

    pub fn go(&mut self) -> Outcome<()> {
        Ok(self.input.as_mut().ok_or("it was told to end")?.write_all(b"go\n")?)
    }

    /// How many jobs its executor has run.
    pub fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    /// How many jobs its executor has run, for someone else to look at.
    pub fn counter(&self) -> Arc<AtomicU64> {
        self.done.clone()
    }

    /// An error when it has ended by itself.
    pub fn check_alive(&mut self) -> Outcome<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("it ended with {status}").into()),
        }
    }

    fn pid(&self) -> u32 {
        self.process.id()
    }

    /// What it has used so far of the CPU, user and system, in seconds.
    pub fn cpu_seconds(&self) -> f64 {
        // Fields 14 and 15, in ticks of 10 ms; the name before them may hold spaces.
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap_or_default();
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
        fields.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
    }

    /// Its memory: `VmRSS` just now, or `VmHWM` the most it ever had. NaN when it has ended.
    pub fn memory_mib(&self, which: &str) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix(which)?.strip_prefix(':'));
        line.and_then(|text| text.trim().strip_suffix(" kB")?.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1024.0
    }

    /// The rest of the next line that starts so.
    pub fn line(&self, word: &str) -> Outcome<String> {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).map_err(|_| format!("it ended, or never said: {word}"))?;
            if let Some(rest) = line.strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
        }
    }

    pub fn number(&self, word: &str) -> Outcome<f64> {
        Ok(self.line(word)?.parse()?)
    }

    /// The numbers of all lines that start so and have come by now; other lines are dropped.
    pub fn heard(&self, word: &str) -> Vec<f64> {
        self.lines.try_iter().filter_map(|line| line.strip_prefix(word)?.trim().parse().ok()).collect()
    }

    /// The numbers of all lines that start so, until `end`.
    pub fn numbers(&self, word: &str) -> Outcome<Vec<f64>> {
        let [numbers] = self.several([word])?;
        Ok(numbers)
    }

    /// The numbers of all lines that start with one of these, until `end`.
    pub fn several<const N: usize>(&self, words: [&str; N]) -> Outcome<[Vec<f64>; N]> {
        let mut numbers = [const { Vec::new() }; N];
        loop {
            let line = self.lines.recv_timeout(PATIENCE).map_err(|_| "it ended, or never came to an end")?;
            if line == "end" {
                return Ok(numbers);
            }
            for (word, numbers) in words.iter().zip(&mut numbers) {
                if let Some(number) = line.strip_prefix(word) {
                    numbers.push(number.trim().parse()?);
                }
            }
        }
    }

    pub fn tell_to_end(&mut self) {
        self.input = None;
    }

    /// Waits for a process that ends by itself.
    pub fn finished(mut self) -> Outcome<()> {
        self.tell_to_end();
        let status = self.process.wait()?;
        if status.success() { Ok(()) } else { Err(format!("it ended with {status}").into()) }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.tell_to_end();
        let end = Instant::now() + GRACE;
        while Instant::now() < end {
            if !matches!(self.process.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        _ = self.process.kill();
        _ = self.process.wait();
    }
}
