//! Damaged pictures, texts and mails, thousands of them, on one worker: it neither panics nor ends, keeps within its
//! memory, and says what is wrong.

use std::io::Cursor;
use std::sync::Arc;
use std::time::{Duration, Instant};

use image::codecs::gif::GifEncoder;
use image::{DynamicImage, Frame, GrayImage, ImageFormat, Luma, RgbImage, RgbaImage};
use jobrequest::queue::NewJob;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::sleep;

use super::memory::{BESIDE_MIB, peak_kib};
use super::smtp::SmtpServer;
use super::support::db::Database;
use super::support::program::Program;

/// Of each picture format, of text and of mail.
const EACH: usize = 500;
const BUDGET_MIB: u64 = 208;
const PATIENCE: Duration = Duration::from_secs(600);

#[derive(Debug, Clone)]
enum Damage {
    /// One of these numbers over what stands there, in either order of bytes.
    Number(Index, usize, u64, bool),
    Flip(Index, u8),
    Cut(Index),
    Drop(Index, u8),
    Repeat(Index, u8),
    Insert(Index, Vec<u8>),
}

fn damages() -> impl Strategy<Value = Vec<Damage>> {
    let numbers = prop_oneof![
        prop::sample::select(vec![
            0_u64,
            1,
            0x7f,
            0x80,
            0xff,
            0x7fff,
            0x8000,
            0xffff,
            0x7fff_ffff,
            0x8000_0000,
            u64::MAX
        ]),
        any::<u64>(),
    ];
    let damage = prop_oneof![
        4 => (any::<Index>(), prop::sample::select(vec![1_usize, 2, 4]), numbers, any::<bool>())
            .prop_map(|(at, width, number, big)| Damage::Number(at, width, number, big)),
        4 => (any::<Index>(), 0_u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
        1 => any::<Index>().prop_map(Damage::Cut),
        1 => (any::<Index>(), any::<u8>()).prop_map(|(at, length)| Damage::Drop(at, length)),
        1 => (any::<Index>(), any::<u8>()).prop_map(|(at, length)| Damage::Repeat(at, length)),
        1 => (any::<Index>(), prop::collection::vec(any::<u8>(), 1..32)).prop_map(|(at, new)| Damage::Insert(at, new)),
    ];
    prop::collection::vec(damage, 1..5)
}

fn damaged(mut bytes: Vec<u8>, damages: &[Damage]) -> Vec<u8> {
    for damage in damages {
        if bytes.is_empty() {
            break;
        }
        let length = bytes.len();
        let end = |at: usize, more: u8| (at + usize::from(more)).min(length);
        match damage {
            Damage::Number(at, width, number, big) => {
                let at = at.index(length);
                let number = if *big {
                    number.to_be_bytes()[8 - width..].to_vec()
                } else {
                    number.to_le_bytes()[..*width].to_vec()
                };
                for (byte, new) in bytes[at..].iter_mut().zip(number) {
                    *byte = new;
                }
            }
            Damage::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
            Damage::Cut(at) => bytes.truncate(at.index(length)),
            Damage::Drop(at, more) => {
                let at = at.index(length);
                bytes.drain(at..end(at, *more));
            }
            Damage::Repeat(at, more) => {
                let at = at.index(length);
                let part = bytes[at..end(at, *more)].to_vec();
                bytes.splice(at..at, part);
            }
            Damage::Insert(at, new) => {
                let at = at.index(length);
                bytes.splice(at..at, new.iter().copied());
            }
        }
    }
    bytes
}

/// Makes the checksums of a PNG's chunks right again (CRC-32, PNG section 5.3), so that damage gets past them.
fn with_checksums(mut png: Vec<u8>) -> Vec<u8> {
    let mut at = 8;
    while let Some(length) = png.get(at..at + 4) {
        let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
        let Some(checked) = png.get(at + 4..(at + 8).saturating_add(length)) else { break };
        let mut crc = u32::MAX;
        for byte in checked {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
            }
        }
        let Some(sum) = png.get_mut(at + 8 + length..at + 12 + length) else { break };
        sum.copy_from_slice(&(!crc).to_be_bytes());
        at += 12 + length;
    }
    png
}

/// Whole pictures of a format, of several kinds.
fn pictures(format: ImageFormat) -> Vec<Vec<u8>> {
    let encoded = |picture: DynamicImage| {
        let mut bytes = Vec::new();
        picture.write_to(&mut Cursor::new(&mut bytes), format).unwrap();
        bytes
    };
    let colours = RgbImage::from_fn(33, 24, |x, y| image::Rgb([(x * 7) as u8, (y * 9) as u8, (x * y) as u8]));
    let clear = RgbaImage::from_fn(20, 31, |x, y| image::Rgba([(x * 11) as u8, 7, (y * 5) as u8, (x * y) as u8]));
    let grey = GrayImage::from_fn(17, 9, |x, y| Luma([(x * y) as u8]));
    match format {
        ImageFormat::Png => {
            let deep = DynamicImage::from(clear.clone()).into_rgba16();
            let files: [&[u8]; 3] = [
                include_bytes!("../data/itxt_bomb.png"),
                include_bytes!("../data/adobe_rgb.png"),
                include_bytes!("../data/lstar_rgb.png"),
            ];
            let own = [encoded(colours.into()), encoded(clear.into()), encoded(grey.into()), encoded(deep.into())];
            own.into_iter().chain(files.map(<[u8]>::to_vec)).collect()
        }
        ImageFormat::Jpeg => {
            vec![encoded(colours.into()), encoded(grey.into()), include_bytes!("../data/cmyk.jpg").to_vec()]
        }
        ImageFormat::WebP => {
            let files: [&[u8]; 3] = [
                include_bytes!("../data/animated.webp"),
                include_bytes!("../data/sets.webp"),
                include_bytes!("../data/alpha.webp"),
            ];
            let own = [encoded(colours.into()), encoded(clear.into())];
            own.into_iter().chain(files.map(<[u8]>::to_vec)).collect()
        }
        _ => {
            let mut animated = Vec::new();
            let mut encoder = GifEncoder::new(&mut animated);
            for shade in [10, 200] {
                encoder
                    .encode_frame(Frame::new(RgbaImage::from_pixel(20, 20, image::Rgba([shade, 0, 9, 255]))))
                    .unwrap();
            }
            drop(encoder);
            vec![encoded(clear.into()), animated]
        }
    }
}

fn damaged_pictures(runner: &mut TestRunner) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for format in [ImageFormat::Png, ImageFormat::Jpeg, ImageFormat::WebP, ImageFormat::Gif] {
        let whole = pictures(format);
        for n in 0..EACH {
            let damages = damages().new_tree(runner).unwrap().current();
            let picture = damaged(whole[n % whole.len()].clone(), &damages);
            let mend = format == ImageFormat::Png && n % 4 != 0;
            all.push(if mend { with_checksums(picture) } else { picture });
        }
    }
    all
}

const TEXTS: &[&str] = &[
    "Dr. Smith paid 3.14 dollars, e.g. for tea. \"Why?\" she asked. - One\n- Two\n\nA heading\nAnd a line.",
    "第一文です。第二文です！第三文です？ هذه جملة أولى؟ وهذه ثانية۔ यह पहला वाक्य है। यह दूसरा है।",
    "\u{1F469}\u{200D}\u{1F469}\u{200D}\u{1F467} e\u{301}e\u{301}. ((((B. \u{202e}C.\u{2029}D…)))) a.) 1 b.) 2",
];
const MAILS: &[&str] = &["Ada <ada@x.test>, \"Beh, B\" <b@x.test>", "株式会社 <c@例え.テスト>", "a+b.c'd@x.test"];

/// Damaged as bytes; what is no UTF-8 then is replaced, and NUL, which no row can hold, left out.
fn damaged_text(runner: &mut TestRunner, text: &str) -> String {
    let damages = damages().new_tree(runner).unwrap().current();
    String::from_utf8_lossy(&damaged(text.as_bytes().to_vec(), &damages)).replace('\0', "")
}

fn damaged_words(runner: &mut TestRunner) -> Vec<(&'static str, Value)> {
    let mut all = Vec::new();
    for n in 0..EACH {
        let text = damaged_text(runner, &TEXTS[n % TEXTS.len()].repeat(1 + n % 7));
        all.push(("summarize_text", json!({"text": text, "max_words": 1 + n % 20})));
        let mut mail = json!({
            "to": MAILS[n % MAILS.len()], "subject": "Grüße 😀", "body": "a\n.\nMAIL FROM:<x@y.test>\r..b", "html": "<p>é</p>",
            "cc": "c@x.test", "reply_to": "D <d@x.test>",
        });
        let fields: Vec<String> = mail.as_object().unwrap().keys().cloned().collect();
        for field in fields.iter().skip(n % fields.len()).take(1 + n % 7 / 6) {
            let text = mail[field].as_str().unwrap().to_owned();
            mail[field] = damaged_text(runner, &text).into();
        }
        all.push(("send_email", mail));
    }
    all
}

/// Answers `/N` with the nth of these.
async fn serving(files: Vec<Vec<u8>>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let files = Arc::new(files);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let files = files.clone();
            tokio::spawn(async move {
                let mut read = Vec::new();
                while stream.read_buf(&mut read).await.is_ok_and(|length| length > 0) {
                    if !read.ends_with(b"\r\n\r\n") {
                        continue;
                    }
                    let head = String::from_utf8_lossy(&read).into_owned();
                    let file = &files[head.split(['/', ' ']).nth(2).unwrap().parse::<usize>().unwrap()];
                    let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", file.len());
                    drop(stream.write_all(&[answer.as_bytes(), file].concat()).await);
                    read.clear();
                }
            });
        }
    });
    format!("http://{address}")
}

#[tokio::test(flavor = "multi_thread")]
async fn no_damaged_picture_text_or_mail_makes_the_worker_panic_end_or_take_more_than_its_budget() {
    let (db, directory) = (Database::new().await, tempfile::tempdir().unwrap());
    let mut runner = TestRunner::deterministic();
    let (pictures, words) = (damaged_pictures(&mut runner), damaged_words(&mut runner));
    let sizes = [(16, 16, "cover", "png"), (40, 7, "fill", "jpeg"), (9, 90, "contain", "webp")];
    let count = pictures.len();
    let url = serving(pictures).await;
    let picture = |n: usize| {
        let (width, height, fit, format) = sizes[n % sizes.len()];
        let payload = json!({
            "source_url": format!("{url}/{n}"), "width": width, "height": height, "fit": fit, "format": format,
            "destination": format!("{}.{format}", n % 50),
        });
        ("resize_image", payload)
    };
    let jobs: Vec<NewJob> = (0..count)
        .map(picture)
        .chain(words)
        .map(|(kind, payload)| NewJob { max_attempts: 1, ..NewJob::new(kind, payload) })
        .collect();
    let total = jobs.len() as i64;
    for batch in jobs.chunks(500) {
        for outcome in db.queue().enqueue_many(batch).await {
            outcome.unwrap();
        }
    }

    let (store, smtp) = (url::Url::from_directory_path(directory.path()).unwrap(), SmtpServer::start().await);
    let (database, budget) = (db.url(), BUDGET_MIB.to_string());
    let worker = Program::start(
        &["worker"],
        &[
            ("DATABASE_URL", database.as_str()),
            ("JOBREQUEST_POLL_SECONDS", "0.1"),
            ("JOBREQUEST_EGRESS_ALLOW", "127.0.0.0/8"),
            ("JOBREQUEST_ORIGIN_CONCURRENCY", "1024"),
            ("JOBREQUEST_OBJECT_STORE_URL", store.as_str()),
            ("JOBREQUEST_SMTP_URL", &smtp.url()),
            ("JOBREQUEST_SMTP_FROM", "shop@example.org"),
            ("JOBREQUEST_MEMORY_BUDGET_MIB", &budget),
        ],
    );
    worker.until("/readyz", 200).await;
    let (before, started) = (peak_kib(&worker), Instant::now());
    let ended = "SELECT count(*) FROM jobs WHERE status IN ('succeeded', 'failed_permanent')";
    while db.value::<i64>(ended).await < total {
        assert!(started.elapsed() < PATIENCE, "{} of {total} are done", db.value::<i64>(ended).await);
        sleep(Duration::from_millis(100)).await;
    }
    let taken = (peak_kib(&worker) - before) / 1024;
    let reasons: Value = db
        .value(
            "SELECT jsonb_object_agg(reason, n) FROM (SELECT kind || ' ' || \
             coalesce(substring(last_error FROM '^[A-Za-z]+(?=:)'), last_error, 'succeeded') AS reason, count(*) AS n \
             FROM jobs GROUP BY 1) AS counted",
        )
        .await;
    println!("{total} jobs in {:?}, {taken} MiB: {reasons:#}", started.elapsed());
    for reason in reasons.as_object().unwrap().keys() {
        let known = [
            "succeeded",
            "ImageInvalid",
            "ImageUnsupported",
            "ImageTooLarge",
            "PayloadInvalid",
            "MessageInvalid",
            "RecipientsRefused",
        ];
        assert!(known.contains(&reason.split_once(' ').unwrap().1), "{reason}");
    }
    assert_eq!(db.value::<i64>("SELECT max(attempts)::int8 FROM jobs").await, 1, "the worker ended once");
    assert!(taken <= BUDGET_MIB + BESIDE_MIB, "{taken} MiB with a budget of {BUDGET_MIB}");
}
