//! The Rust peers, each behind the same few commands: our own short code on their public APIs.
//!
//! peers graphile|seed setup | preload N | drain | enqueue N TASKS | latency N EVERY_MS
//! on the database at $DATABASE_URL. graphile takes $LOCAL_QUEUE (SIZE or COUNTxSIZE; `default` for its own settings).

mod graphile;
#[path = "../../../protocol.rs"]
mod protocol;
mod seed;

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (peer, rest) = arguments.split_first().expect("a peer's name");
    let database = std::env::var("DATABASE_URL").expect("DATABASE_URL");
    match peer.as_str() {
        "graphile" => graphile::run(&database, rest).await,
        "seed" => seed::run(&database, rest).await,
        other => panic!("no peer of this name: {other}"),
    }
    // Pools and workers are not waited for: what counts has been said.
    std::process::exit(0);
}

fn number(arguments: &[String], at: usize) -> u64 {
    arguments.get(at).and_then(|word| word.parse().ok()).expect("a number")
}
