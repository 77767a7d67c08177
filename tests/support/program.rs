//! The built program as a process of its own: started, signalled, killed, and asked over HTTP how it does.

use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

const PATIENCE: Duration = Duration::from_secs(20);
/// The first port for programs, and how many there are.
const PORTS: (u16, u16) = (10_000, 9_000);
/// How much of a program's log a failed test shows.
const TAIL_LINES: usize = 60;

/// `jobrequest` with nothing of the tests' environment but PATH.
pub fn command(arguments: &[&str], variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_jobrequest"));
    command.args(arguments).env_clear().env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command.env("HOME", std::env::temp_dir()).envs(variables.iter().copied()).stdin(Stdio::null());
    command
}

/// A command that ends by itself: its exit code, stdout and stderr.
pub fn output(arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let output = command(arguments, variables).output().expect("the program was built");
    let text = |bytes| String::from_utf8(bytes).expect("it writes UTF-8");
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// A running controller or worker; killed when dropped.
pub struct Program {
    name: String,
    child: Child,
    address: SocketAddr,
    log: TempDir,
}

impl Program {
    pub fn start(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let log = tempfile::tempdir().expect("a directory");
        let file = std::fs::File::create(log.path().join("log")).expect("a file");
        let address = free_address();
        let child = command(arguments, variables)
            .env("JOBREQUEST_HTTP_ADDR", address.to_string())
            .stdout(Stdio::null())
            .stderr(file)
            .spawn()
            .expect("the program was built");
        Self { name: arguments.join(" "), child, address, log }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log.path().join("log")).expect("it is there")
    }

    /// Where it serves HTTP.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by name: TERM, INT, STOP, CONT.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([format!("-{name}"), self.id().to_string()]).status().expect("kill runs");
        assert!(sent.success(), "the program is gone: {}", self.log());
    }

    /// SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.child.kill().expect("it is ours");
        self.child.wait().expect("it is ours");
    }

    pub async fn exit(&mut self) -> ExitStatus {
        let started = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("it is ours") {
                return status;
            }
            assert!(started.elapsed() < PATIENCE, "it does not end: {}", self.log());
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// The code of a page and its text; 0 as long as nobody answers.
    pub async fn get(&self, path: &str) -> (u16, String) {
        let answer = async {
            let mut stream = TcpStream::connect(self.address).await?;
            let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer).await?;
            Ok::<_, std::io::Error>(answer)
        };
        let answer = timeout(PATIENCE, answer).await.expect("it answers or refuses").unwrap_or_default();
        let code = answer.split(' ').nth(1).and_then(|code| code.parse().ok()).unwrap_or(0);
        (code, answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default())
    }

    /// Waits until a page answers with this code; its text.
    pub async fn until(&self, path: &str, code: u16) -> String {
        let started = Instant::now();
        loop {
            let (answered, text) = self.get(path).await;
            if answered == code {
                return text;
            }
            assert!(started.elapsed() < PATIENCE, "{path} says {answered} {text}: {}", self.log());
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Processor time used so far, in user and kernel.
    pub fn cpu(&self) -> Duration {
        let mut stat = String::new();
        std::fs::File::open(format!("/proc/{}/stat", self.id()))
            .and_then(|mut file| file.read_to_string(&mut stat))
            .expect("it runs");
        let after_name = stat.rsplit_once(") ").expect("a name in brackets").1;
        let ticks = after_name.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number"));
        Duration::from_millis(ticks.sum::<u64>() * 10)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
        if std::thread::panicking() {
            let log = std::fs::read_to_string(self.log.path().join("log")).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            let tail = lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n");
            eprintln!("--- the end of the log of {}:\n{tail}\n---", self.name);
        }
    }
}

/// An address of loopback where nobody listens. Not from the range that the system gives to outgoing connections: one of
/// those could take it before the program does.
pub fn free_address() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let start = std::process::id();
    for _ in 0..PORTS.1 {
        let number = u32::from(NEXT.fetch_add(1, Ordering::SeqCst)) + start % 10_000 * 97;
        let port = PORTS.0 + u16::try_from(number % u32::from(PORTS.1)).expect("a small number");
        if let Ok(listener) = TcpListener::bind(("127.0.0.1", port)) {
            return listener.local_addr().expect("it is bound");
        }
    }
    panic!("no port is free");
}

/// How a process ended, in words: a code or a signal.
pub fn ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown".to_owned(),
    }
}
