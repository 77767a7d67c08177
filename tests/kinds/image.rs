use std::io::Cursor;

use image::{DynamicImage, ImageFormat, RgbImage};
use jobrequest::kinds::image::ObjectStoreSettings;
use jobrequest::kinds::{Failure, FailureCause, KindSettings};
use serde_json::{Value, json};

use super::sink::Sink;
use super::{attempt, executor, loopback};

const KIND: &str = "resize_image";

fn settings(directory: &std::path::Path) -> KindSettings {
    let url = url::Url::from_file_path(directory).unwrap();
    let store = ObjectStoreSettings::parse(url.as_str(), []).unwrap();
    KindSettings { object_store: Some(store), ..loopback() }
}

fn png(width: u32, height: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    let picture = DynamicImage::from(RgbImage::from_pixel(width, height, image::Rgb([200, 10, 10])));
    picture.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png).unwrap();
    bytes
}

async fn resize(settings: &KindSettings, payload: &Value) -> Result<Value, Failure> {
    executor(KIND, settings).execute(&attempt(payload)).await
}

#[tokio::test]
async fn a_picture_is_fetched_resized_and_kept_in_its_namespaces_folder() {
    let (sink, directory) = (Sink::serving(png(60, 30)).await, tempfile::tempdir().unwrap());
    let payload = json!({"source_url": sink.url("/file"), "width": 20, "height": 20, "destination": "thumbs/42.jpg"});
    let result = resize(&settings(directory.path()), &payload).await.unwrap();
    let kept = directory.path().join("shop/thumbs/42.jpg");
    let bytes = std::fs::read(&kept).unwrap();
    let url = url::Url::from_file_path(kept.canonicalize().unwrap()).unwrap();
    assert_eq!(
        result,
        json!({
            "url": url.as_str(), "key": "shop/thumbs/42.jpg", "width": 20, "height": 10, "bytes": bytes.len(),
            "format": "jpeg", "animated": false,
        })
    );
    assert_eq!(image::guess_format(&bytes).unwrap(), ImageFormat::Jpeg);
    // again: the same object, replaced
    assert_eq!(resize(&settings(directory.path()), &payload).await.unwrap(), result);
}

#[tokio::test]
async fn without_a_destination_the_key_is_the_jobs_id_and_the_format_the_sources() {
    let (sink, directory) = (Sink::serving(png(6, 3)).await, tempfile::tempdir().unwrap());
    let mut attempt = attempt(&json!({"source_url": sink.url("/file"), "width": 4, "height": 4}));
    attempt.namespace = None;
    let result = executor(KIND, &settings(directory.path())).execute(&attempt).await.unwrap();
    assert_eq!(result["key"], format!("_sql/{}.png", attempt.job_id));
    assert!(directory.path().join(format!("_sql/{}.png", attempt.job_id)).is_file());
}

#[tokio::test]
async fn no_destination_leaves_its_folder_and_no_file_is_a_source() {
    let directory = tempfile::tempdir().unwrap();
    for (field, value) in [
        ("destination", "../blog/x.png"),
        ("destination", "/etc/x.png"),
        ("destination", "a/../../x.png"),
        ("destination", "a//x.png"),
        ("destination", "a/./x.png"),
        ("destination", "%2e%2e/x.png"),
        ("destination", "a\\..\\x.png"),
        ("destination", "a/.."),
        ("destination", "a/x.png#1"),
        ("destination", "a/\u{0}x.png"),
        ("destination", ""),
        ("source_url", "file:///etc/passwd"),
        ("source_url", "ftp://example.com/a.png"),
    ] {
        let mut payload = json!({"source_url": "http://127.0.0.1/", "width": 4, "height": 4});
        payload[field] = json!(value);
        let failure = resize(&settings(directory.path()), &payload).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, "PayloadInvalid"), "{value:?}");
        assert!(failure.message().starts_with(&format!("payload.{field}: ")), "{}", failure.message());
    }
    let foreign = json!({"source_url": "s3://other/shop/a.png", "width": 4, "height": 4});
    assert_eq!(resize(&settings(directory.path()), &foreign).await.unwrap_err().reason(), "SourceNotAllowed");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_source_that_is_no_picture_is_missing_or_has_no_end_fails_for_good() {
    let (sink, directory) = (Sink::serving(b"<html>not a picture</html>".to_vec()).await, tempfile::tempdir().unwrap());
    for (target, reason) in
        [("/file", "ImageUnsupported"), ("/code/404", "StatusRefused"), ("/endless", "SourceTooLarge")]
    {
        let payload = json!({"source_url": sink.url(target), "width": 4, "height": 4});
        let failure = resize(&settings(directory.path()), &payload).await.unwrap_err();
        assert_eq!((failure.cause(), failure.reason()), (FailureCause::Permanent, reason));
    }
}

#[tokio::test]
async fn without_a_store_the_operator_is_told_what_to_set() {
    let payload = json!({"source_url": "http://127.0.0.1/", "width": 4, "height": 4});
    let failure = resize(&loopback(), &payload).await.unwrap_err();
    assert_eq!((failure.cause(), failure.reason()), (FailureCause::Passing, "NotConfigured"));
    assert!(failure.message().contains("JOBREQUEST_OBJECT_STORE_URL"));
}
