//! What pictures cost the process that resizes them, measured on the built worker.

use std::io::Cursor;
use std::time::{Duration, Instant};

use image::{DynamicImage, ImageBuffer, ImageFormat, RgbImage, Rgba, RgbaImage};
use jobrequest::queue::NewJob;
use serde_json::json;
use tokio::time::sleep;
use uuid::Uuid;

use super::sink::Sink;
use super::support::db::Database;
use super::support::program::Program;

const MIB: u64 = 1024 * 1024;
/// Of it 32 MiB are for what is fetched. The rest has room for one of the larger pictures at a time.
const BUDGET_MIB: u64 = 208;
/// Stacks, pools, buffers of sockets: what a worker takes more when it works than when it has just started.
pub const BESIDE_MIB: u64 = 48;
const JOBS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(300);

fn encoded(picture: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    picture.into().write_to(&mut Cursor::new(&mut bytes), format).unwrap();
    bytes
}

/// Rows all alike, so that they are made fast; a value of `channels` for each column.
fn rows<T: Copy>((width, height): (usize, usize), channels: usize, value: impl Fn(usize) -> T) -> Vec<T> {
    let row: Vec<T> = (0..width * channels).map(value).collect();
    row.repeat(height)
}

fn clear(width: u32, height: u32) -> RgbaImage {
    let pixels = rows((width as usize, height as usize), 4, |at| (at / 40) as u8);
    RgbaImage::from_raw(width, height, pixels).unwrap()
}

/// By what each takes decoded: 100, 48, 90 and 36 MB.
fn pictures() -> Vec<Vec<u8>> {
    let deep = rows((3000, 2000), 4, |at| (at * 5) as u16);
    let deep = ImageBuffer::<Rgba<u16>, _>::from_raw(3000, 2000, deep).unwrap();
    let photo = RgbImage::from_raw(6000, 5000, rows((6000, 5000), 3, |at| (at / 100) as u8)).unwrap();
    vec![
        encoded(clear(5000, 5000), ImageFormat::Png),
        encoded(deep, ImageFormat::Png),
        encoded(photo, ImageFormat::Jpeg),
        encoded(clear(3000, 3000), ImageFormat::WebP),
    ]
}

/// In KiB: the most that the process has had in memory so far.
pub fn peak_kib(worker: &Program) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", worker.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

async fn enqueue(db: &Database, url: &str, side: u32, format: &str) -> Uuid {
    let payload = json!({"source_url": url, "width": side, "height": side, "format": format});
    db.queue().enqueue(&NewJob::new("resize_image", payload)).await.unwrap().id()
}

#[tokio::test(flavor = "multi_thread")]
async fn many_large_pictures_at_once_stay_within_the_budget_and_hold_up_neither_probes_nor_heartbeats() {
    let (db, directory) = (Database::new().await, tempfile::tempdir().unwrap());
    let store = url::Url::from_directory_path(directory.path()).unwrap();
    let budget = BUDGET_MIB.to_string();
    let url = db.url();
    let worker = Program::start(
        &["worker"],
        &[
            ("DATABASE_URL", url.as_str()),
            ("JOBREQUEST_LEASE_SECONDS", "3"),
            ("JOBREQUEST_POLL_SECONDS", "0.1"),
            ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8"),
            ("JOBREQUEST_OBJECT_STORE_URL", store.as_str()),
            ("JOBREQUEST_MEMORY_BUDGET_MIB", &budget),
        ],
    );
    worker.until("/readyz", 200).await;
    let before = peak_kib(&worker);

    let pictures = tokio::task::spawn_blocking(pictures).await.unwrap();
    let mut sinks = Vec::new();
    for picture in pictures {
        sinks.push(Sink::serving(picture).await);
    }
    let mut jobs = Vec::new();
    for (sink, (side, format)) in
        sinks.iter().cycle().zip([(1000, "png"), (500, "jpeg"), (1200, "webp")].iter().cycle()).take(JOBS)
    {
        jobs.push(enqueue(&db, &sink.url("/file"), *side, format).await);
    }
    let started = Instant::now();
    let waiting = "SELECT count(*) FROM jobs WHERE status <> 'succeeded'";
    let (mut slowest, mut most_at_once) = (Duration::ZERO, 0);
    while db.value::<i64>(waiting).await > 0 {
        assert!(started.elapsed() < PATIENCE, "{} are not done", db.value::<i64>(waiting).await);
        assert_eq!(db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'failed_permanent'").await, 0);
        let running = db.value::<i64>("SELECT count(*) FROM jobs WHERE status = 'running'").await;
        most_at_once = most_at_once.max(running);
        let asked = Instant::now();
        assert_eq!(worker.get("/healthz").await.0, 200);
        slowest = slowest.max(asked.elapsed());
        sleep(Duration::from_millis(20)).await;
    }
    let taken = (peak_kib(&worker) - before) / 1024;
    println!("{} pictures in {:?}: {taken} MiB, slowest probe {slowest:?}", jobs.len(), started.elapsed());
    assert!(slowest < Duration::from_secs(1), "a probe took {slowest:?}");
    assert!(taken <= BUDGET_MIB + BESIDE_MIB, "{taken} MiB with a budget of {BUDGET_MIB}");
    assert!(taken > 95, "{taken} MiB can't be true: the largest picture alone has 95");
    assert!(most_at_once > 4, "only {most_at_once} at once");
    assert_eq!(db.value::<i64>("SELECT sum(attempts) FROM jobs").await, JOBS as i64, "no heartbeat was late");
}

#[tokio::test]
async fn a_picture_that_never_fits_is_refused_for_good_and_says_what_to_do() {
    let (db, directory) = (Database::new().await, tempfile::tempdir().unwrap());
    let picture = tokio::task::spawn_blocking(|| encoded(clear(7000, 7000), ImageFormat::Png)).await.unwrap();
    let (sink, store) = (Sink::serving(picture).await, url::Url::from_directory_path(directory.path()).unwrap());
    let url = db.url();
    let worker = Program::start(
        &["worker"],
        &[
            ("DATABASE_URL", url.as_str()),
            ("JOBREQUEST_POLL_SECONDS", "0.1"),
            ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8"),
            ("JOBREQUEST_OBJECT_STORE_URL", store.as_str()),
            ("JOBREQUEST_MEMORY_BUDGET_MIB", "128"),
        ],
    );
    worker.until("/readyz", 200).await;
    let before = peak_kib(&worker);
    let id = enqueue(&db, &sink.url("/file"), 100, "png").await;
    let started = Instant::now();
    while db.status(id).await != "failed_permanent" {
        assert!(started.elapsed() < PATIENCE, "the job is {}", db.status(id).await);
        sleep(Duration::from_millis(20)).await;
    }
    let error = db.value::<String>(&format!("SELECT last_error FROM jobs WHERE id = '{id}'")).await;
    for part in ["ImageTooLarge: ", "source_url", "width and height", "JOBREQUEST_MEMORY_BUDGET_MIB", " 96 for it"] {
        assert!(error.contains(part), "{error}");
    }
    let taken = (peak_kib(&worker) - before) * 1024;
    assert!(taken < (32 + BESIDE_MIB) * MIB, "{taken} bytes: it was decoded");
}
