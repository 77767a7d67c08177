//! `resize_image`: fetches a picture, resizes it and writes it to the operator's object store.
//!
//! A retry writes the same object again. An object that is there already is replaced, whoever wrote it: within one
//! namespace a `destination` belongs to whoever names it.

mod blocks;
mod colour;
mod header;
mod pixels;
mod store;
#[cfg(test)]
mod tests;
mod vp8l;

use futures::FutureExt;
use futures::future::BoxFuture;
use object_store::path::Path;
use reqwest::{Method, Request};
use serde::Deserialize;
use serde_json::{Value, json};
use url::Url;

pub use store::ObjectStoreSettings;

use self::header::Header;
use self::pixels::{Fit, Format, Resized, Wanted};
use super::cpu::{MIB, Pool, Room};
use super::egress::{self, Egress};
use super::payload::{Field, PayloadError, Shape, check_fields, optional, required};
use super::{Attempt, Executed, Executor, Failure};

pub const KIND: &str = "resize_image";

/// The longest side of a result.
const MAX_SIDE: u64 = 10_000;
/// Width times height of a result.
const MAX_PIXELS: u64 = 40_000_000;
const MAX_SOURCE_BYTES: usize = 32 * 1024 * 1024;

const FIELDS: &[Field] = &[
    required("source_url", Shape::Text { max_chars: 2048 }),
    required("width", Shape::Integer { min: 1, max: MAX_SIDE }),
    required("height", Shape::Integer { min: 1, max: MAX_SIDE }),
    optional("fit", Shape::OneOf(&["contain", "cover", "fill"])),
    optional("format", Shape::OneOf(&["png", "jpeg", "webp"])),
    optional("destination", Shape::Text { max_chars: 900 }),
];

pub struct ResizeImage {
    egress: Egress,
    store: Option<ObjectStoreSettings>,
    pool: Pool,
}

/// A picture as it was fetched, and the room it takes.
struct Source {
    bytes: Vec<u8>,
    _room: Room,
}

#[derive(Debug)]
struct Order {
    source: Url,
    /// The format as asked for, or as the destination's ending says; else the source's.
    wanted: Wanted,
    destination: Option<Path>,
}

#[derive(Deserialize)]
struct Payload {
    source_url: String,
    width: u32,
    height: u32,
    fit: Option<String>,
    format: Option<String>,
    destination: Option<String>,
}

impl ResizeImage {
    pub(crate) fn new(egress: Egress, store: Option<ObjectStoreSettings>, pool: Pool) -> Self {
        Self { egress, store, pool }
    }

    async fn resize(&self, attempt: &Attempt) -> Executed {
        let Some(store) = &self.store else {
            return Err(Failure::passing(
                "NotConfigured",
                "this install has no object store: set JOBREQUEST_OBJECT_STORE_URL",
            ));
        };
        let Order { source, wanted, destination } = attempt.checked(parse)?;
        let source = self.fetch(attempt, store, source).await?;
        let (resized, room) = self.work(attempt, source, wanted).await?;
        let Resized { bytes, width, height, format, animated } = resized;
        let name = || Path::from(format!("{}.{}", attempt.job_id, format.name()));
        let path = store.place(attempt.namespace.as_deref(), &destination.unwrap_or_else(name));
        let written = bytes.len();
        store.write(&path, bytes.into(), format.content_type()).await?;
        drop(room);
        Ok(json!({
            "url": store.url_of(&path),
            "key": path.as_ref(),
            "width": width,
            "height": height,
            "bytes": written,
            "format": format.name(),
            "animated": animated,
        }))
    }

    /// Reads the source into room of its own; while there is none, nothing of it is read.
    async fn fetch(&self, attempt: &Attempt, store: &ObjectStoreSettings, source: Url) -> Result<Source, Failure> {
        let room = async |length: Option<u64>| match length {
            Some(length) if length > MAX_SOURCE_BYTES as u64 => Err(too_large(MAX_SOURCE_BYTES)),
            length => self.pool.source_room(attempt, length.unwrap_or(MAX_SOURCE_BYTES as u64)).await,
        };
        if !matches!(source.scheme(), "http" | "https") {
            let path = store.source(attempt.namespace.as_deref(), &source)?;
            let (bytes, room) = store.read(&path, MAX_SOURCE_BYTES, room).await?;
            return Ok(Source { bytes, _room: room });
        }
        let request = Request::new(Method::GET, source);
        let (reply, room) = self.egress.download(attempt, request, MAX_SOURCE_BYTES, room).await?;
        if reply.truncated { Err(too_large(MAX_SOURCE_BYTES)) } else { Ok(Source { bytes: reply.body, _room: room }) }
    }

    /// Resizes in room for the most that this picture takes; the room that is left holds the result.
    async fn work(&self, attempt: &Attempt, source: Source, wanted: Wanted) -> Result<(Resized, Room), Failure> {
        let read = move |_: &_| Header::read(&source.bytes).map(|header| (header, source));
        let (header, source) = self.pool.run(attempt, read).await?;
        let plan = header.plan(wanted);
        let needed = header.peak_bytes(&plan);
        if needed > self.pool.work_bytes() {
            return Err(too_much_memory(needed, self.pool.work_bytes()));
        }
        let mut room = self.pool.room(attempt, needed).await?;
        let resize = move |stop: &_| {
            let resized = pixels::resize(source, &header, &plan, stop)?;
            room.shrink_to(resized.bytes.len() as u64);
            Ok((resized, room))
        };
        self.pool.run(attempt, resize).await
    }
}

impl AsRef<[u8]> for Source {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Executor for ResizeImage {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        let work = async {
            tokio::time::timeout_at(attempt.soft_deadline(), self.resize(attempt)).await.unwrap_or_else(|_| {
                Err(Failure::passing("Timeout", "the picture was not done when the attempt's time was over"))
            })
        };
        attempt.unless_stopped(work).boxed()
    }
}

pub(super) fn validate(payload: &Value) -> Result<(), PayloadError> {
    parse(payload).map(drop)
}

fn parse(payload: &Value) -> Result<Order, PayloadError> {
    check_fields(payload, FIELDS)?;
    let Payload { source_url, width, height, fit, format, destination } =
        Payload::deserialize(payload).map_err(|_| PayloadError::new("", "can't be read as a picture's"))?;
    if u64::from(width) * u64::from(height) > MAX_PIXELS {
        return Err(PayloadError::new("width", "times height must be at most 40000000"));
    }
    let destination = destination.as_deref().map(store::parse_key).transpose()?;
    let by_ending = || destination.as_ref()?.extension().and_then(|ending| Format::named(&ending.to_ascii_lowercase()));
    Ok(Order {
        source: parse_source(&source_url)?,
        wanted: Wanted {
            size: (width, height),
            fit: match fit.as_deref() {
                Some("cover") => Fit::Cover,
                Some("fill") => Fit::Fill,
                Some(_) | None => Fit::Contain,
            },
            format: format.as_deref().and_then(Format::named).or_else(by_ending),
        },
        destination,
    })
}

fn parse_source(text: &str) -> Result<Url, PayloadError> {
    if let Ok(url) = Url::parse(text)
        && matches!(url.scheme(), "s3" | "gs" | "az")
    {
        return Ok(url);
    }
    egress::parse_url(text).map_err(|problem| PayloadError::new("source_url", problem))
}

fn too_large(limit: usize) -> Failure {
    Failure::permanent("SourceTooLarge", format!("the source has more than {} MiB", limit / 1024 / 1024))
}

fn too_much_memory(needed: u64, most: u64) -> Failure {
    let mib = |bytes: u64| bytes.div_ceil(MIB);
    Failure::permanent(
        "ImageTooLarge",
        format!(
            "resizing this picture takes up to {} MiB of memory, and a worker of this install has {} for it: use a smaller \
             one in source_url, a smaller width and height, or have the operator raise JOBREQUEST_MEMORY_BUDGET_MIB",
            mib(needed),
            most / MIB
        ),
    )
}
