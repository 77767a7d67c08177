//! From the bytes of one picture to the bytes of another. Pure, and run on a blocking thread.
//!
//! Stages: limits by the header alone, decode, turn upright, resize, encode; the job can be stopped between them.
//! Filtering is done on gamma-encoded values, as Pillow and browsers do, with a Lanczos-3 kernel and premultiplied
//! alpha.

use std::io::Cursor;

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::codecs::gif::GifDecoder;
use image::codecs::jpeg::JpegEncoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::{WebPDecoder, WebPEncoder};
use image::{
    AnimationDecoder, DynamicImage, GrayAlphaImage, GrayImage, ImageDecoder, ImageError, ImageFormat, ImageReader,
    Limits, RgbImage, RgbaImage,
};

use crate::kinds::Failure;
use crate::kinds::cpu::Stop;

/// Width times height of a source, decoded: a 50-megapixel camera.
const MAX_SOURCE_PIXELS: u64 = 50_000_000;
const MAX_SOURCE_SIDE: u32 = 20_000;
/// What decoding may allocate: the pixels of the largest source at 4 bytes each, and room for the decoder.
const MAX_DECODE_BYTES: u64 = 256 * 1024 * 1024;
/// Between 0 and 100. Where photographs stop getting visibly better.
const JPEG_QUALITY: u8 = 85;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fit {
    /// As large as fits into the box, whole, its proportions kept.
    Contain,
    /// Fills the box, its proportions kept, what sticks out cut off evenly.
    Cover,
    /// Exactly the box, stretched.
    Fill,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    Png,
    Jpeg,
    Webp,
}

pub(super) struct Resized {
    pub(super) bytes: Vec<u8>,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) format: Format,
    /// The source had more frames than the first, which is the one that was taken.
    pub(super) animated: bool,
}

impl Format {
    pub(super) fn named(word: &str) -> Option<Self> {
        match word {
            "png" => Some(Self::Png),
            "jpeg" | "jpg" => Some(Self::Jpeg),
            "webp" => Some(Self::Webp),
            _ => None,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Png => "png",
            Self::Jpeg => "jpeg",
            Self::Webp => "webp",
        }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::Png => "image/png",
            Self::Jpeg => "image/jpeg",
            Self::Webp => "image/webp",
        }
    }
}

/// `wanted` is the format to write; without it that of the source, a GIF becoming a PNG.
///
/// # Errors
/// Permanent `ImageUnsupported`, `ImageInvalid` or `ImageTooLarge`; cancelled.
pub(super) fn resize(
    source: &[u8],
    (width, height): (u32, u32),
    fit: Fit,
    wanted: Option<Format>,
    stop: &Stop,
) -> Result<Resized, Failure> {
    let (picture, format, animated) = decode(source)?;
    stop.check()?;
    let (target, crop) = geometry((picture.width(), picture.height()), (width, height), fit);
    let picture = scale(picture, target, crop)?;
    stop.check()?;
    let format = wanted.unwrap_or(format);
    let bytes = encode(picture, format)?;
    stop.check()?;
    Ok(Resized { bytes, width: target.0, height: target.1, format, animated })
}

fn decode(source: &[u8]) -> Result<(DynamicImage, Format, bool), Failure> {
    let unsupported = || Failure::permanent("ImageUnsupported", "the source is no PNG, JPEG, WebP or GIF picture");
    let kind = image::guess_format(source).map_err(|_| unsupported())?;
    let format = match kind {
        ImageFormat::Png | ImageFormat::Gif => Format::Png,
        ImageFormat::Jpeg => Format::Jpeg,
        ImageFormat::WebP => Format::Webp,
        _ => return Err(unsupported()),
    };
    let mut reader = ImageReader::with_format(Cursor::new(source), kind);
    reader.limits(limits());
    let mut decoder = reader.into_decoder().map_err(|error| describe(&error))?;
    let (width, height) = decoder.dimensions();
    if width == 0 || height == 0 {
        return Err(Failure::permanent("ImageInvalid", "the picture has no pixels"));
    }
    if u64::from(width) * u64::from(height) > MAX_SOURCE_PIXELS || decoder.total_bytes() > MAX_DECODE_BYTES {
        return Err(too_many_pixels());
    }
    // a picture whose orientation can't be read is shown as it is stored, as browsers do
    let orientation = decoder.orientation().unwrap_or(image::metadata::Orientation::NoTransforms);
    let mut picture = DynamicImage::from_decoder(decoder).map_err(|error| describe(&error))?;
    picture.apply_orientation(orientation);
    Ok((picture, format, is_animated(source, kind)))
}

fn limits() -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SOURCE_SIDE);
    limits.max_image_height = Some(MAX_SOURCE_SIDE);
    limits.max_alloc = Some(MAX_DECODE_BYTES);
    limits
}

/// Whether there is a second frame. The picture itself has been decoded, so doubts count as no.
fn is_animated(source: &[u8], kind: ImageFormat) -> bool {
    match kind {
        ImageFormat::Gif => GifDecoder::new(Cursor::new(source)).is_ok_and(|mut decoder| {
            decoder.set_limits(limits()).is_ok() && decoder.into_frames().take(2).filter_map(Result::ok).count() == 2
        }),
        ImageFormat::Png => PngDecoder::with_limits(Cursor::new(source), limits())
            .is_ok_and(|decoder| decoder.is_apng().unwrap_or(false)),
        ImageFormat::WebP => WebPDecoder::new(Cursor::new(source)).is_ok_and(|decoder| decoder.has_animation()),
        _ => false,
    }
}

/// A part of the source: left, top, width, height.
type Crop = (f64, f64, f64, f64);

/// The size of the result and the part of the source that goes into it. No side is ever 0.
pub(super) fn geometry(source: (u32, u32), wanted: (u32, u32), fit: Fit) -> ((u32, u32), Crop) {
    let (w, h) = (u64::from(source.0), u64::from(source.1));
    let (bw, bh) = (u64::from(wanted.0), u64::from(wanted.1));
    let whole = (0.0, 0.0, f64::from(source.0), f64::from(source.1));
    // rounded half up, in whole numbers; at most the wanted side, so it fits u32
    let share = |side: u64, of: u64, by: u64| {
        let rounded = (2 * side * of + by) / (2 * by);
        u32::try_from(rounded.max(1)).unwrap_or(u32::MAX)
    };
    let source_is_wider = w * bh > h * bw;
    match fit {
        Fit::Fill => (wanted, whole),
        Fit::Contain if source_is_wider => ((wanted.0, share(h, bw, w).min(wanted.1)), whole),
        Fit::Contain => ((share(w, bh, h).min(wanted.0), wanted.1), whole),
        Fit::Cover => {
            let (sw, sh) = (f64::from(source.0), f64::from(source.1));
            let aspect = f64::from(wanted.0) / f64::from(wanted.1);
            let (cw, ch) = if source_is_wider { (sh * aspect, sh) } else { (sw, sw / aspect) };
            (wanted, ((sw - cw) / 2.0, (sh - ch) / 2.0, cw, ch))
        }
    }
}

fn scale(picture: DynamicImage, (width, height): (u32, u32), crop: Crop) -> Result<DynamicImage, Failure> {
    let failed = || Failure::permanent("ImageInvalid", "the picture could not be resized");
    let picture = to_eight_bits(picture);
    let pixel = match &picture {
        DynamicImage::ImageLuma8(_) => PixelType::U8,
        DynamicImage::ImageLumaA8(_) => PixelType::U8x2,
        DynamicImage::ImageRgb8(_) => PixelType::U8x3,
        _ => PixelType::U8x4,
    };
    let resized = |source: &[u8], size: (u32, u32), crop: Crop, target: (u32, u32)| {
        let from = ImageRef::new(size.0, size.1, source, pixel).map_err(|_| failed())?;
        let mut into = Image::new(target.0, target.1, pixel);
        let options = ResizeOptions::new()
            .resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3))
            .crop(crop.0, crop.1, crop.2, crop.3);
        Resizer::new().resize(&from, &mut into, &options).map_err(|_| failed())?;
        Ok::<_, Failure>(into.into_vec())
    };
    let (size, (left, top, crop_width, crop_height)) = ((picture.width(), picture.height()), crop);
    let pixels = if columns_first(crop_width, (width, height)) {
        let narrow = (width, size.1);
        let step = resized(picture.as_bytes(), size, (left, 0.0, crop_width, f64::from(size.1)), narrow)?;
        resized(&step, narrow, (0.0, top, f64::from(width), crop_height), (width, height))?
    } else {
        resized(picture.as_bytes(), size, crop, (width, height))?
    };
    match picture {
        DynamicImage::ImageLuma8(_) => GrayImage::from_raw(width, height, pixels).map(Into::into),
        DynamicImage::ImageLumaA8(_) => GrayAlphaImage::from_raw(width, height, pixels).map(Into::into),
        DynamicImage::ImageRgb8(_) => RgbImage::from_raw(width, height, pixels).map(Into::into),
        _ => RgbaImage::from_raw(width, height, pixels).map(Into::into),
    }
    .ok_or_else(failed)
}

/// The resizer works on rows first: between its two passes it holds the source's width times the result's height, which
/// of a wide source and a tall result is many times either. Columns first is then never more than the larger of the two.
fn columns_first(crop_width: f64, (_, height): (u32, u32)) -> bool {
    crop_width * f64::from(height) > MAX_SOURCE_PIXELS as f64
}

/// 16 bits and floats become 8 bits, rounded; the number of channels stays.
fn to_eight_bits(picture: DynamicImage) -> DynamicImage {
    match picture {
        DynamicImage::ImageLuma8(_)
        | DynamicImage::ImageLumaA8(_)
        | DynamicImage::ImageRgb8(_)
        | DynamicImage::ImageRgba8(_) => picture,
        DynamicImage::ImageLuma16(_) => picture.into_luma8().into(),
        DynamicImage::ImageLumaA16(_) => picture.into_luma_alpha8().into(),
        DynamicImage::ImageRgb16(_) | DynamicImage::ImageRgb32F(_) => picture.into_rgb8().into(),
        _ => picture.into_rgba8().into(),
    }
}

fn encode(picture: DynamicImage, format: Format) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    match format {
        Format::Png => picture.write_to(&mut Cursor::new(&mut bytes), ImageFormat::Png),
        Format::Jpeg => over_white(picture).write_with_encoder(JpegEncoder::new_with_quality(&mut bytes, JPEG_QUALITY)),
        Format::Webp => picture.write_with_encoder(WebPEncoder::new_lossless(&mut bytes)),
    }
    .map_err(|error| describe(&error))?;
    Ok(bytes)
}

/// JPEG has no alpha: the picture is laid over white. What was clear shows white, whatever colour hid there.
fn over_white(picture: DynamicImage) -> DynamicImage {
    let blend = |value: u8, alpha: u8| {
        let (value, alpha) = (u32::from(value), u32::from(alpha));
        // at most 255, by construction
        ((value * alpha + 255 * (255 - alpha) + 127) / 255) as u8
    };
    match picture {
        DynamicImage::ImageLumaA8(source) => GrayImage::from_fn(source.width(), source.height(), |x, y| {
            let [grey, alpha] = source.get_pixel(x, y).0;
            image::Luma([blend(grey, alpha)])
        })
        .into(),
        DynamicImage::ImageRgba8(source) => RgbImage::from_fn(source.width(), source.height(), |x, y| {
            let [r, g, b, alpha] = source.get_pixel(x, y).0;
            image::Rgb([blend(r, alpha), blend(g, alpha), blend(b, alpha)])
        })
        .into(),
        opaque => opaque,
    }
}

fn too_many_pixels() -> Failure {
    Failure::permanent("ImageTooLarge", "the picture has more than 50 million pixels or a side over 20000")
}

/// A picture that can't be decoded today can't be tomorrow: all of these are permanent.
fn describe(error: &ImageError) -> Failure {
    match error {
        ImageError::Limits(_) => too_many_pixels(),
        ImageError::Unsupported(_) => {
            Failure::permanent("ImageUnsupported", "the picture uses a feature of its format that is not supported")
        }
        ImageError::Encoding(_) | ImageError::Parameter(_) => {
            Failure::permanent("ImageInvalid", "the picture can't be written in the wanted format")
        }
        ImageError::Decoding(_) | ImageError::IoError(_) => {
            Failure::permanent("ImageInvalid", "the picture is damaged or incomplete")
        }
    }
}
