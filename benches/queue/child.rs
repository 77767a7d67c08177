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

    /// An error when it has ended by itself.
    pub fn check_alive(&mut self) -> Outcome<()> {
        match self.process.try_wait()? {
            None => Ok(()),
            Some(status) => Err(format!("it ended with {status}").into()),
        }
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
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

    /// The numbers of all lines that start so, until `end`.
    pub fn numbers(&self, word: &str) -> Outcome<Vec<f64>> {
        let mut numbers = Vec::new();
        loop {
            let line = self.lines.recv_timeout(PATIENCE).map_err(|_| format!("it ended, or never said: {word}"))?;
            match line.strip_prefix(word) {
                Some(number) => numbers.push(number.trim().parse()?),
                None if line == "end" => return Ok(numbers),
                None => {}
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
