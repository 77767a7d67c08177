//! Where pictures are kept: the operator's object store, one folder for each namespace.
//!
//! A key that a payload names is always below `<prefix>/<namespace>/`, for writing and for reading.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{Attribute, Attributes, ObjectStore, ObjectStoreExt, PutOptions};
use url::Url;

use crate::kinds::egress::root_cause;
use crate::kinds::payload::PayloadError;
use crate::kinds::{Failure, NO_NAMESPACE, SettingsError};

/// The longest name in common file systems.
const MAX_SEGMENT_BYTES: usize = 200;
const MAX_KEY_BYTES: usize = 900;

/// The store and the place in it (`JOBREQUEST_OBJECT_STORE_URL`).
#[derive(Clone)]
pub struct ObjectStoreSettings {
    store: Arc<dyn ObjectStore>,
    /// The URL of the store's root: what a key is appended to.
    root: Url,
    prefix: Path,
}

impl ObjectStoreSettings {
    /// `url` is `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix` or `file:///directory`, which is made
    /// if missing. `options` are the store's own settings by the names of their usual environment variables
    /// (`AWS_REGION`, `GOOGLE_SERVICE_ACCOUNT`, `AZURE_STORAGE_ACCOUNT_NAME` …); others in it are passed over.
    ///
    /// # Errors
    /// A sentence that says what is wrong, without credentials.
    pub fn parse(url: &str, options: impl IntoIterator<Item = (String, String)>) -> Result<Self, SettingsError> {
        let wrong = |problem: String| SettingsError::new(format!("the object store URL {problem}"));
        let mut root = Url::parse(url)
            .map_err(|_| wrong("is not a URL such as s3://bucket/prefix or file:///directory".to_owned()))?;
        if !root.username().is_empty()
            || root.password().is_some()
            || root.query().is_some()
            || root.fragment().is_some()
        {
            // Results name the object by this URL.
            return Err(wrong(
                "holds more than a bucket and a prefix; credentials and settings go into the store's own variables \
                 (AWS_…, GOOGLE_…, AZURE_…)"
                    .to_owned(),
            ));
        }
        if root.scheme() == "file" {
            let directory = root.to_file_path().map_err(|()| wrong("names no local directory".to_owned()))?;
            let made = std::fs::create_dir_all(&directory);
            made.map_err(|e| wrong(format!("names a directory that can't be made: {}", e.kind())))?;
            let store = LocalFileSystem::new_with_prefix(&directory)
                .map_err(|_| wrong("names a directory that can't be used".to_owned()))?;
            return Ok(Self { store: Arc::new(store), root, prefix: Path::default() });
        }
        if !matches!(root.scheme(), "s3" | "gs" | "az") {
            return Err(wrong("must begin with s3://, gs://, az:// or file:///".to_owned()));
        }
        let (store, prefix) = object_store::parse_url_opts(&root, options)
            .map_err(|_| wrong("can't be used with the store's settings (region, account, credentials)".to_owned()))?;
        root.set_path("");
        Ok(Self { store: store.into(), root, prefix })
    }

    fn folder(&self, namespace: Option<&str>) -> Path {
        self.prefix.clone().join(namespace.unwrap_or(NO_NAMESPACE))
    }

    /// The object a payload's `destination` means for this namespace.
    pub(super) fn place(&self, namespace: Option<&str>, destination: &Path) -> Path {
        destination.parts().fold(self.folder(namespace), Path::join)
    }

    /// The object that a source URL names in this store, if it is one.
    ///
    /// # Errors
    /// Permanent `SourceNotAllowed` when it lies outside the namespace's folder or in another store.
    pub(super) fn source(&self, namespace: Option<&str>, url: &Url) -> Result<Path, Failure> {
        let refused = || {
            Failure::permanent("SourceNotAllowed", "source_url is not in this namespace's folder of the object store")
        };
        if url.scheme() != self.root.scheme() || url.host() != self.root.host() || url.scheme() == "file" {
            return Err(refused());
        }
        let path = Path::from_url_path(url.path()).map_err(|_| refused())?;
        let folder = self.folder(namespace);
        let inside = path.prefix_match(&folder).is_some_and(|mut rest| rest.next().is_some());
        if inside { Ok(path) } else { Err(refused()) }
    }

    /// The object's address for people and tools.
    pub(super) fn url_of(&self, path: &Path) -> String {
        let mut url = self.root.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty();
            for part in path.parts() {
                segments.push(part.as_ref());
            }
        }
        url.into()
    }

    /// Reads an object once `room` has given some for its length.
    ///
    /// # Errors
    /// Permanent `SourceNotFound` or `SourceTooLarge`, passing `StoreUnavailable`; those of `room`.
    pub(super) async fn read<R>(
        &self,
        path: &Path,
        limit: usize,
        room: impl AsyncFnOnce(Option<u64>) -> Result<R, Failure>,
    ) -> Result<(Vec<u8>, R), Failure> {
        let found = self.store.get(path).await.map_err(|error| match error {
            object_store::Error::NotFound { .. } => {
                Failure::permanent("SourceNotFound", "the object store has no object at source_url")
            }
            other => unavailable("read", &other),
        })?;
        let length = found.meta.size;
        let room = room(Some(length)).await?;
        let limit = usize::try_from(length).map_or(limit, |length| length.min(limit));
        let mut bytes = Vec::with_capacity(limit);
        let mut chunks = found.into_stream();
        while let Some(chunk) = chunks.next().await {
            let chunk = chunk.map_err(|error| unavailable("read", &error))?;
            if bytes.len() + chunk.len() > limit {
                return Err(super::too_large(limit));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok((bytes, room))
    }

    /// Writes the whole object or nothing; one of that name is replaced.
    ///
    /// # Errors
    /// Passing `StoreUnavailable`.
    pub(super) async fn write(&self, path: &Path, bytes: Bytes, content_type: &'static str) -> Result<(), Failure> {
        let mut options = PutOptions::default();
        // a directory has nowhere to keep it
        if self.root.scheme() != "file" {
            options.attributes = Attributes::from_iter([(Attribute::ContentType, content_type)]);
        }
        self.store.put_opts(path, bytes.into(), options).await.map_err(|error| unavailable("write", &error))?;
        Ok(())
    }
}

impl std::fmt::Debug for ObjectStoreSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ObjectStoreSettings({}, {})", self.root, self.prefix)
    }
}

/// The store's own words can hold addresses and requests, so they stay in the log: the innermost ones, since those
/// around it name the object, and that is the payload's.
fn unavailable(doing: &str, error: &object_store::Error) -> Failure {
    tracing::warn!(error = root_cause(error), doing, "object store failed");
    Failure::passing(
        "StoreUnavailable",
        format!("the object store could not {doing} the picture; see the worker's log"),
    )
}

/// Reads a payload's `destination`: a relative key that can't leave the folder it is appended to.
pub(super) fn parse_key(text: &str) -> Result<Path, PayloadError> {
    let wrong = |problem: &str| Err(PayloadError::new("destination", problem));
    let plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '+' | '=' | '@' | ',' | ' ' | '(' | ')');
    // S3 takes 1024 with the prefix and the namespace.
    if text.len() > MAX_KEY_BYTES {
        return wrong("must be at most 900 bytes");
    }
    for segment in text.split('/') {
        if matches!(segment, "" | "." | "..") {
            return wrong("must be a relative key such as thumbs/42.png, no part of it empty, . or ..");
        }
        if segment.len() > MAX_SEGMENT_BYTES {
            return wrong("must have no part of more than 200 bytes");
        }
        if !segment.chars().all(plain) {
            return wrong("must hold only letters, digits, spaces, slashes and . _ - + = @ , ( )");
        }
    }
    Path::parse(text).or_else(|_| wrong("must be a relative key such as thumbs/42.png"))
}
