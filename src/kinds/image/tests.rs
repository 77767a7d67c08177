use super::*;

use std::io::{Cursor, Write};
use std::sync::LazyLock;

use ::image::codecs::gif::GifEncoder;
use ::image::{
    DynamicImage, Frame, GrayImage, ImageBuffer, ImageEncoder, ImageFormat, Luma, Rgb, RgbImage, Rgba, RgbaImage,
};
use header::geometry;

use crate::kinds::cpu::Stop;

fn encoded(picture: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Vec::new();
    picture.into().write_to(&mut Cursor::new(&mut bytes), format).unwrap();
    bytes
}

fn resize(source: &[u8], wanted: Wanted) -> Result<Resized, Failure> {
    let header = Header::read(source)?;
    pixels::resize(source, &header, &header.plan(wanted), &Stop::never())
}

fn resized(source: &[u8], size: (u32, u32), fit: Fit, format: Option<Format>) -> (Resized, DynamicImage) {
    let resized = resize(source, Wanted { size, fit, format }).unwrap();
    let picture = ::image::load_from_memory(&resized.bytes).unwrap();
    assert_eq!((picture.width(), picture.height()), (resized.width, resized.height));
    (resized, picture)
}

fn refused(source: &[u8]) -> &'static str {
    let failure = resize(source, Wanted { size: (8, 8), fit: Fit::Contain, format: None }).err().unwrap();
    assert_eq!(failure.cause(), crate::kinds::FailureCause::Permanent);
    failure.reason()
}

/// A PNG chunk; the checksum is CRC-32 (PNG, section 5.3).
fn chunk(name: &[u8; 4], data: &[u8]) -> Vec<u8> {
    let mut crc = u32::MAX;
    for byte in name.iter().chain(data) {
        crc ^= u32::from(*byte);
        for _ in 0..8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
        }
    }
    [&u32::try_from(data.len()).unwrap().to_be_bytes(), name.as_slice(), data, &(!crc).to_be_bytes()].concat()
}

/// 50000 x 50000 by its header, some 80 bytes in all.
fn bomb() -> Vec<u8> {
    let side = 50_000_u32.to_be_bytes();
    let header = [&side[..], &side, &[8, 6, 0, 0, 0]].concat();
    let nothing = [0x78, 0x9c, 0x03, 0x00, 0x00, 0x00, 0x00, 0x01];
    [b"\x89PNG\r\n\x1a\n".to_vec(), chunk(b"IHDR", &header), chunk(b"IDAT", &nothing), chunk(b"IEND", b"")].concat()
}

/// A JPEG turned by EXIF orientation 6: stored 40 x 20, left red, right blue; upright 20 x 40 with red on top.
static TURNED: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let stored = RgbImage::from_fn(40, 20, |x, _| if x < 20 { Rgb([255, 0, 0]) } else { Rgb([0, 0, 255]) });
    let plain = encoded(stored, ImageFormat::Jpeg);
    // little-endian TIFF with one entry: tag 0x0112, type SHORT, count 1, value 6
    let exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0";
    let mut bytes = plain[..2].to_vec();
    bytes.write_all(&[0xff, 0xe1]).unwrap();
    bytes.write_all(&u16::try_from(exif.len() + 2).unwrap().to_be_bytes()).unwrap();
    bytes.write_all(exif).unwrap();
    bytes.extend_from_slice(&plain[2..]);
    bytes
});

#[test]
fn each_fit_has_its_size_and_no_side_is_ever_0() {
    let whole = |w: u32, h: u32| (0.0, 0.0, f64::from(w), f64::from(h));
    for (source, wanted, fit, size, crop) in [
        ((400, 200), (100, 100), Fit::Contain, (100, 50), whole(400, 200)),
        ((200, 400), (100, 100), Fit::Contain, (50, 100), whole(200, 400)),
        ((100, 100), (40, 30), Fit::Contain, (30, 30), whole(100, 100)),
        ((3, 2), (100, 100), Fit::Contain, (100, 67), whole(3, 2)),
        ((5000, 1), (100, 100), Fit::Contain, (100, 1), whole(5000, 1)),
        ((1, 5000), (100, 100), Fit::Contain, (1, 100), whole(1, 5000)),
        ((10, 10), (100, 50), Fit::Contain, (50, 50), whole(10, 10)),
        ((4000, 3000), (1024, 1024), Fit::Contain, (1024, 768), whole(4000, 3000)),
        ((400, 200), (100, 100), Fit::Cover, (100, 100), (100.0, 0.0, 200.0, 200.0)),
        ((200, 400), (100, 100), Fit::Cover, (100, 100), (0.0, 100.0, 200.0, 200.0)),
        ((400, 200), (7, 9), Fit::Fill, (7, 9), whole(400, 200)),
    ] {
        assert_eq!(geometry(source, wanted, fit), (size, crop), "{source:?} into {wanted:?} by {fit:?}");
    }
}

#[test]
fn every_size_fits_its_box() {
    for (w, h) in [(1, 1), (1, 20_000), (20_000, 1), (7, 13), (9999, 10_000), (8191, 3)] {
        for wanted in [(1, 1), (1, 8192), (8192, 1), (3, 2), (8192, 4000)] {
            let ((width, height), _) = geometry((w, h), wanted, Fit::Contain);
            assert!((1..=wanted.0).contains(&width) && (1..=wanted.1).contains(&height), "{w}x{h} into {wanted:?}");
            assert!(width == wanted.0 || height == wanted.1);
        }
    }
}

#[test]
fn a_picture_comes_out_in_the_wanted_format_or_its_own() {
    let picture = RgbImage::from_pixel(40, 20, Rgb([10, 200, 30]));
    for (source, own) in [
        (ImageFormat::Png, Format::Png),
        (ImageFormat::Jpeg, Format::Jpeg),
        (ImageFormat::WebP, Format::Webp),
        (ImageFormat::Gif, Format::Png),
    ] {
        let bytes = encoded(picture.clone(), source);
        for wanted in [None, Some(Format::Png), Some(Format::Jpeg), Some(Format::Webp)] {
            let (result, picture) = resized(&bytes, (10, 10), Fit::Contain, wanted);
            assert_eq!(
                (result.format, result.width, result.height, result.animated),
                (wanted.unwrap_or(own), 10, 5, false)
            );
            let Rgb([r, g, b]) = *picture.to_rgb8().get_pixel(5, 2);
            assert!(r.abs_diff(10) < 12 && g.abs_diff(200) < 12 && b.abs_diff(30) < 12, "{source:?} to {wanted:?}");
        }
    }
}

#[test]
fn the_orientation_is_applied_and_then_gone() {
    let (result, picture) = resized(&TURNED, (20, 40), Fit::Fill, Some(Format::Png));
    let picture = picture.to_rgb8();
    assert!(picture.get_pixel(10, 5).0[0] > 200 && picture.get_pixel(10, 35).0[2] > 200);
    assert!(!result.bytes.windows(4).any(|window| window == b"Exif" || window == b"eXIf"));
    assert_eq!(geometry((20, 40), (10, 10), Fit::Contain).0, (5, 10));
    assert_eq!(resized(&TURNED, (10, 10), Fit::Contain, None).0.width, 5, "the size is that of the upright picture");
}

#[test]
fn sixteen_bits_are_scaled_and_not_clipped() {
    let ramp = ImageBuffer::<Luma<u16>, Vec<u16>>::from_fn(256, 1, |x, _| Luma([u16::try_from(x * 257).unwrap()]));
    let bytes = encoded(ramp, ImageFormat::Png);
    for format in [Format::Png, Format::Jpeg] {
        let (_, picture) = resized(&bytes, (256, 1), Fit::Fill, Some(format));
        assert!(picture.to_luma8().get_pixel(128, 0).0[0].abs_diff(128) <= 4);
    }
}

#[test]
fn what_is_clear_becomes_white_in_a_jpeg_whatever_colour_hid_there() {
    let half = RgbaImage::from_fn(16, 8, |x, _| if x < 8 { Rgba([255, 0, 0, 0]) } else { Rgba([0, 255, 0, 255]) });
    let (_, picture) = resized(&encoded(half, ImageFormat::Png), (16, 8), Fit::Fill, Some(Format::Jpeg));
    let picture = picture.to_rgb8();
    let near =
        |x: u32, wanted: [u8; 3]| picture.get_pixel(x, 4).0.iter().zip(wanted).all(|(is, want)| is.abs_diff(want) < 40);
    assert!(
        near(2, [255, 255, 255]) && near(13, [0, 255, 0]),
        "{:?} {:?}",
        picture.get_pixel(2, 4),
        picture.get_pixel(13, 4)
    );
}

#[test]
fn of_an_animation_the_first_frame_is_taken_and_said_so() {
    let mut bytes = Vec::new();
    let mut encoder = GifEncoder::new(&mut bytes);
    for colour in [[255, 0, 0, 255], [0, 255, 0, 255]] {
        encoder.encode_frame(Frame::new(RgbaImage::from_pixel(20, 20, Rgba(colour)))).unwrap();
    }
    drop(encoder);
    let (result, picture) = resized(&bytes, (10, 10), Fit::Contain, None);
    assert!(result.animated);
    assert!(picture.to_rgb8().get_pixel(5, 5).0[0] > 250);
}

#[test]
fn a_wide_picture_made_tall_comes_out_right_without_its_width_times_the_new_height_in_between() {
    // 200 million pixels in between if rows came first.
    let ramp = GrayImage::from_fn(20_000, 40, |x, y| Luma([u8::try_from(x / 100 + y).unwrap()]));
    let (_, picture) = resized(&encoded(ramp, ImageFormat::Png), (10, 10_000), Fit::Fill, None);
    for (x, y, wanted) in [(0, 0, 10), (9, 0, 190), (0, 9_999, 49), (9, 9_999, 229), (4, 5_000, 110)] {
        let grey = picture.to_luma8().get_pixel(x, y).0[0];
        assert!(grey.abs_diff(wanted) <= 3, "{grey} at {x}, {y}, not {wanted}");
    }
}

#[test]
fn a_grey_picture_stays_grey() {
    let (_, picture) =
        resized(&encoded(GrayImage::from_pixel(9, 9, Luma([77])), ImageFormat::Png), (3, 3), Fit::Cover, None);
    assert_eq!(picture.as_luma8().unwrap().get_pixel(1, 1).0, [77]);
}

/// What Display P3 shows, in sRGB, by the definitions of the two (IEC 61966-2-1; SMPTE EG 432-1 with sRGB's curve).
fn p3_in_srgb(p3: [u8; 3]) -> [u8; 3] {
    const P3_TO_SRGB: [[f64; 3]; 3] =
        [[1.224_940, -0.224_940, 0.0], [-0.042_057, 1.042_057, 0.0], [-0.019_638, -0.078_636, 1.098_274]];
    let linear = p3.map(|value| {
        let value = f64::from(value) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    });
    P3_TO_SRGB.map(|row| {
        let value: f64 = row.iter().zip(linear).map(|(factor, value)| factor * value).sum();
        let value = if value <= 0.003_130_8 { value * 12.92 } else { 1.055 * value.powf(1.0 / 2.4) - 0.055 };
        (value.clamp(0.0, 1.0) * 255.0).round() as u8
    })
}

fn with_profile(picture: impl Into<DynamicImage>, format: Format, profile: &moxcms::ColorProfile) -> Vec<u8> {
    let (picture, mut bytes) = (picture.into(), Vec::new());
    let profile = profile.encode().unwrap();
    match format {
        Format::Png => {
            let mut encoder = ::image::codecs::png::PngEncoder::new(&mut bytes);
            encoder.set_icc_profile(profile).unwrap();
            picture.write_with_encoder(encoder).unwrap();
        }
        Format::Jpeg => {
            let mut encoder = ::image::codecs::jpeg::JpegEncoder::new_with_quality(&mut bytes, 100);
            encoder.set_icc_profile(profile).unwrap();
            picture.write_with_encoder(encoder).unwrap();
        }
        Format::Webp => {
            let mut encoder = ::image::codecs::webp::WebPEncoder::new_lossless(&mut bytes);
            encoder.set_icc_profile(profile).unwrap();
            picture.write_with_encoder(encoder).unwrap();
        }
    }
    bytes
}

#[test]
fn colours_of_a_profile_come_out_in_srgb_and_the_profile_is_left_out() {
    let p3 = moxcms::ColorProfile::new_display_p3();
    for format in [Format::Png, Format::Jpeg, Format::Webp] {
        for colour in [[200, 100, 50], [60, 180, 90], [30, 60, 220], [128, 128, 128], [255, 255, 255], [0, 0, 0]] {
            let source = with_profile(RgbImage::from_pixel(16, 16, Rgb(colour)), format, &p3);
            let (result, picture) = resized(&source, (8, 8), Fit::Fill, Some(Format::Png));
            let (is, wanted) = (picture.to_rgb8().get_pixel(4, 4).0, p3_in_srgb(colour));
            assert!(is.iter().zip(wanted).all(|(is, wanted)| is.abs_diff(wanted) <= 3), "{is:?}, not {wanted:?}");
            assert!(!result.bytes.windows(4).any(|four| four == b"iCCP"));
        }
    }
    let clear = with_profile(RgbaImage::from_pixel(9, 9, Rgba([60, 180, 90, 128])), Format::Png, &p3);
    let [r, g, b, alpha] = resized(&clear, (3, 3), Fit::Fill, None).1.to_rgba8().get_pixel(1, 1).0;
    let wanted = p3_in_srgb([60, 180, 90]);
    assert!([r, g, b].iter().zip(wanted).all(|(is, wanted)| is.abs_diff(wanted) <= 4) && alpha == 128);
}

/// CIE 1976 L*a*b* of sRGB, D65.
fn lab(srgb: [u8; 3]) -> [f64; 3] {
    const TO_XYZ: [[f64; 3]; 3] =
        [[0.412_456, 0.357_576, 0.180_438], [0.212_673, 0.715_152, 0.072_175], [0.019_334, 0.119_192, 0.950_304]];
    const WHITE: [f64; 3] = [0.950_47, 1.0, 1.088_83];
    let linear = srgb.map(|value| {
        let value = f64::from(value) / 255.0;
        if value <= 0.04045 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
    });
    let [x, y, z] = [0, 1, 2].map(|at| {
        let share = TO_XYZ[at].iter().zip(linear).map(|(factor, value)| factor * value).sum::<f64>() / WHITE[at];
        if share > 0.008_856 { share.cbrt() } else { 7.787 * share + 16.0 / 116.0 }
    });
    [116.0 * y - 16.0, 500.0 * (x - y), 200.0 * (y - z)]
}

#[test]
fn colours_are_converted_as_pillow_converts_them() {
    for (source, converted) in [
        (
            &include_bytes!("../../../tests/data/adobe_rgb.png")[..],
            &include_bytes!("../../../tests/data/adobe_rgb_in_srgb.png")[..],
        ),
        (
            &include_bytes!("../../../tests/data/lstar_rgb.png")[..],
            &include_bytes!("../../../tests/data/lstar_rgb_in_srgb.png")[..],
        ),
    ] {
        let ours = resized(source, (48, 48), Fit::Fill, Some(Format::Png)).1.to_rgb8();
        let theirs = ::image::load_from_memory(converted).unwrap().to_rgb8();
        let distance = |(one, other): (&Rgb<u8>, &Rgb<u8>)| {
            lab(one.0).iter().zip(lab(other.0)).map(|(one, other)| (one - other).powi(2)).sum::<f64>().sqrt()
        };
        let mean = ours.pixels().zip(theirs.pixels()).map(distance).sum::<f64>() / (48.0 * 48.0);
        println!("mean delta E {mean:.3}");
        assert!(mean <= 2.0, "mean delta E {mean}");
    }
}

#[test]
fn a_grey_profile_is_kept_to_and_one_that_does_not_fit_or_is_damaged_is_passed_over() {
    let linear = moxcms::ColorProfile::new_gray_with_gamma(1.0);
    let source = with_profile(GrayImage::from_pixel(9, 9, Luma([55])), Format::Png, &linear);
    let grey = resized(&source, (3, 3), Fit::Fill, None).1.to_luma8().get_pixel(1, 1).0[0];
    // 55 / 255 of the light is 0.5 of sRGB's curve, or a hair more
    assert!(grey.abs_diff(128) <= 2, "{grey}");
    let p3 = moxcms::ColorProfile::new_display_p3();
    let other = with_profile(GrayImage::from_pixel(9, 9, Luma([55])), Format::Png, &p3);
    assert_eq!(resized(&other, (3, 3), Fit::Fill, None).1.to_luma8().get_pixel(1, 1).0, [55]);
    let mut damaged = with_profile(RgbImage::from_pixel(9, 9, Rgb([60, 180, 90])), Format::Webp, &p3);
    let at = damaged.windows(4).position(|four| four == b"acsp").unwrap();
    damaged[at..at + 64].fill(0xff);
    assert_eq!(resized(&damaged, (3, 3), Fit::Fill, None).1.to_rgb8().get_pixel(1, 1).0, [60, 180, 90]);
}

#[test]
fn a_cmyk_jpeg_shows_its_colours() {
    let bytes = include_bytes!("../../../tests/data/cmyk.jpg");
    let (_, picture) = resized(bytes, (8, 8), Fit::Contain, Some(Format::Png));
    let Rgb([r, g, b]) = *picture.to_rgb8().get_pixel(4, 4);
    assert!(r.abs_diff(255) <= 20 && g <= 20 && b <= 20, "({r}, {g}, {b}) is not red");
}

#[test]
fn an_animated_webp_gives_its_first_frame() {
    let bytes = include_bytes!("../../../tests/data/animated.webp");
    let (result, picture) = resized(bytes, (20, 20), Fit::Contain, Some(Format::Png));
    assert!(result.animated);
    assert_eq!(picture.to_rgba8().get_pixel(6, 6).0, [255, 0, 0, 255]);
}

#[test]
fn text_beside_the_pixels_is_passed_over_however_much_it_inflates() {
    let bytes = include_bytes!("../../../tests/data/itxt_bomb.png");
    let (result, _) = resized(bytes, (8, 8), Fit::Fill, None);
    assert!(result.bytes.len() < 1000, "and it is not in the result");
}

#[test]
fn bombs_scraps_and_strangers_are_refused_for_good() {
    let whole = encoded(RgbImage::new(64, 64), ImageFormat::Png);
    assert_eq!(refused(&bomb()), "ImageTooLarge");
    assert_eq!(refused(&whole[..whole.len() / 2]), "ImageInvalid");
    assert_eq!(refused(b""), "ImageUnsupported");
    assert_eq!(refused(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "ImageUnsupported");
    assert_eq!(refused(b"BM\0\0\0\0"), "ImageUnsupported");
    assert_eq!(refused(&b"\xff\xd8\xff\xe0"[..]), "ImageInvalid");
}

#[test]
fn the_code_tables_of_a_lossless_webp_count_before_it_is_decoded() {
    let wanted = Wanted { size: (4, 4), fit: Fit::Fill, format: None };
    assert_eq!(resize(&vp8l::tests::bomb(50), wanted).unwrap().width, 4, "it is a picture");
    let header = Header::read(&vp8l::tests::bomb(3000)).unwrap();
    let needed = header.peak_bytes(&header.plan(wanted));
    assert!(needed > 200 * MIB, "30 KB that take {needed} bytes");
}

#[test]
fn sizes_that_make_no_picture_are_refused_on_acceptance() {
    for (width, height, field) in [
        (json!(0), json!(5), "width"),
        (json!(-1), json!(5), "width"),
        (json!(4_294_967_295_u64), json!(5), "width"),
        (json!(5), json!(10_001), "height"),
        (json!(5), json!("5"), "height"),
        (json!(8000), json!(8000), "width"),
    ] {
        let payload = json!({"source_url": "https://example.com/a.png", "width": width, "height": height});
        assert_eq!(validate(&payload).unwrap_err().field, field);
    }
}

#[test]
fn the_format_follows_the_destinations_ending_unless_it_is_said() {
    let order = |format: Value, destination: Value| {
        let payload = json!({"source_url": "https://e.com/a", "width": 1, "height": 1, "format": format, "destination": destination});
        parse(&payload).unwrap().wanted.format
    };
    assert_eq!(order(json!(null), json!("a/b.JPG")), Some(Format::Jpeg));
    assert_eq!(order(json!("png"), json!("a/b.jpg")), Some(Format::Png));
    assert_eq!(order(json!(null), json!("a/b.dat")), None);
    assert_eq!(order(json!(null), json!(null)), None);
}

#[test]
fn a_source_in_the_store_lies_in_the_namespaces_folder() {
    let options = [("aws_region", "eu-west-1"), ("aws_access_key_id", "x"), ("aws_secret_access_key", "y")];
    let options = options.map(|(key, value)| (key.to_owned(), value.to_owned()));
    let store = ObjectStoreSettings::parse("s3://pictures/team/one", options).unwrap();
    let found = |url: &str| store.source(Some("shop"), &Url::parse(url).unwrap()).map(|path| path.to_string());
    assert_eq!(found("s3://pictures/team/one/shop/in/a%20b.png").unwrap(), "team/one/shop/in/a b.png");
    for url in [
        "s3://pictures/team/one/shop",
        "s3://pictures/team/one/shop/",
        "s3://pictures/team/one/shopping/a.png",
        "s3://pictures/team/one/blog/a.png",
        "s3://pictures/team/one/shop/../blog/a.png",
        "s3://pictures/team/one/shop/%2e%2e/blog/a.png",
        "s3://pictures/team/one/shop/..%2fblog/a.png",
        "s3://other/team/one/shop/a.png",
        "gs://pictures/team/one/shop/a.png",
        "s3://pictures/shop/a.png",
    ] {
        assert_eq!(found(url).unwrap_err().reason(), "SourceNotAllowed", "{url}");
    }
    let place = store.place(Some("shop"), &store::parse_key("thumbs/a b.png").unwrap());
    assert_eq!(store.url_of(&place), "s3://pictures/team/one/shop/thumbs/a%20b.png");
    assert_eq!(store.place(None, &store::parse_key("a.png").unwrap()).as_ref(), "team/one/_sql/a.png");
}

#[test]
fn a_wrong_store_url_is_one_clear_line() {
    for url in [
        "pictures",
        "ftp://pictures",
        "https://pictures.example.com",
        "file://host/dir",
        "s3://key:hunter2@pictures/out",
        "s3://pictures/out?secret=hunter2",
    ] {
        let error = ObjectStoreSettings::parse(url, []).unwrap_err().to_string();
        assert!(error.starts_with("the object store URL ") && !error.contains('\n'), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}
