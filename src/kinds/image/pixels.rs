//! From the bytes of one picture to the bytes of another. Pure, and run on a blocking thread.
//!
//! Stages: decode, resize, convert to sRGB, turn upright, encode; the job can be stopped between them, and what a stage no longer needs is
//! freed before the next. Filtering is done on gamma-encoded values, as Pillow and browsers do, with a Lanczos-3 kernel
//! and premultiplied alpha.

use std::io::Cursor;

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, MulDiv, PixelType, ResizeAlg, ResizeOptions, Resizer};
use image::codecs::jpeg::JpegEncoder;
use image::codecs::webp::WebPEncoder;
use image::{ColorType, DynamicImage, GrayAlphaImage, GrayImage, ImageDecoder, ImageFormat, RgbImage, RgbaImage};

use super::colour;
use super::header::{Header, Plan, describe};
use crate::kinds::Failure;
use crate::kinds::cpu::Stop;

/// Between 0 and 100. Where photographs stop getting visibly better.
const JPEG_QUALITY: u8 = 85;

/// What the payload asks for. Without a format, that of the source, a GIF becoming a PNG.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) size: (u32, u32),
    pub(super) fit: Fit,
    pub(super) format: Option<Format>,
}

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

/// # Errors
/// Permanent `ImageUnsupported`, `ImageInvalid` or `ImageTooLarge`; cancelled.
pub(super) fn resize(source: impl AsRef<[u8]>, header: &Header, plan: &Plan, stop: &Stop) -> Result<Resized, Failure> {
    let pixels = decode(source, header)?;
    stop.check()?;
    let mut picture = scale(pixels, plan)?;
    stop.check()?;
    if let Some(profile) = &header.profile {
        colour::to_srgb(&mut picture, profile);
        stop.check()?;
    }
    picture.apply_orientation(header.orientation);
    let (width, height) = (picture.width(), picture.height());
    let bytes = encode(picture, plan.format)?;
    stop.check()?;
    Ok(Resized { bytes, width, height, format: plan.format, animated: header.animated })
}

/// Rows of pixels, one after the other, with 1 to 4 channels of 8 bits: grey, grey and alpha, RGB, RGBA.
struct Pixels {
    size: (u32, u32),
    channels: u8,
    bytes: Vec<u8>,
}

/// Frees the source once it is decoded.
fn decode(source: impl AsRef<[u8]>, header: &Header) -> Result<Pixels, Failure> {
    let decoder = header.decoder(source.as_ref())?;
    let length = usize::try_from(decoder.total_bytes()).unwrap_or(usize::MAX);
    let mut bytes = vec![0; length];
    decoder.read_image(&mut bytes).map_err(|error| describe(&error))?;
    let channels = match header.color {
        ColorType::L8 | ColorType::La8 | ColorType::Rgb8 | ColorType::Rgba8 => header.color.channel_count(),
        ColorType::L16 | ColorType::La16 | ColorType::Rgb16 | ColorType::Rgba16 => {
            to_eight_bits(&mut bytes);
            header.color.channel_count()
        }
        _ => {
            return Err(Failure::permanent(
                "ImageUnsupported",
                "the picture has a kind of colours that is not supported",
            ));
        }
    };
    Ok(Pixels { size: (header.width, header.height), channels, bytes })
}

/// 16 bits of this machine's order become 8, rounded, in place.
fn to_eight_bits(bytes: &mut Vec<u8>) {
    let length = bytes.len() / 2;
    for at in 0..length {
        let value = u32::from(u16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]]));
        // at most 255, by construction
        bytes[at] = ((value + 128) / 257) as u8;
    }
    bytes.truncate(length);
    bytes.shrink_to_fit();
}

/// The resizer works on rows first: between its two passes it holds the source's width times the result's height, which
/// of a wide source and a tall result is many times either. Columns first is then never more than the larger of the two.
fn scale(pixels: Pixels, plan: &Plan) -> Result<DynamicImage, Failure> {
    let failed = || Failure::permanent("ImageInvalid", "the picture could not be resized");
    let Pixels { size, channels, mut bytes } = pixels;
    let pixel = match channels {
        1 => PixelType::U8,
        2 => PixelType::U8x2,
        3 => PixelType::U8x3,
        _ => PixelType::U8x4,
    };
    let (target, (left, top, crop_width, crop_height)) = (plan.target, plan.crop);
    let is_cut_only = (crop_width, crop_height) == (f64::from(target.0), f64::from(target.1))
        && left.fract() == 0.0
        && top.fract() == 0.0;
    // The resizer would multiply a copy of the whole source.
    let is_multiplied = channels % 2 == 0 && !is_cut_only;
    if is_multiplied {
        let mut source = Image::from_slice_u8(size.0, size.1, &mut bytes, pixel).map_err(|_| failed())?;
        MulDiv::new().multiply_alpha_inplace(&mut source).map_err(|_| failed())?;
    }
    let resized = |source: &[u8], size: (u32, u32), crop: (f64, f64, f64, f64), target: (u32, u32)| {
        let from = ImageRef::new(size.0, size.1, source, pixel).map_err(|_| failed())?;
        let mut into = Image::new(target.0, target.1, pixel);
        let options = ResizeOptions::new()
            .resize_alg(ResizeAlg::Convolution(FilterType::Lanczos3))
            .use_alpha(false)
            .crop(crop.0, crop.1, crop.2, crop.3);
        Resizer::new().resize(&from, &mut into, &options).map_err(|_| failed())?;
        Ok::<_, Failure>(into)
    };
    let mut result = if plan.columns_first {
        let narrow = (target.0, size.1);
        let step = resized(&bytes, size, (left, 0.0, crop_width, f64::from(size.1)), narrow)?;
        resized(step.buffer(), narrow, (0.0, top, f64::from(target.0), crop_height), target)?
    } else {
        resized(&bytes, size, plan.crop, target)?
    };
    drop(bytes);
    if is_multiplied {
        MulDiv::new().divide_alpha_inplace(&mut result).map_err(|_| failed())?;
    }
    let (bytes, (width, height)) = (result.into_vec(), target);
    match channels {
        1 => GrayImage::from_raw(width, height, bytes).map(Into::into),
        2 => GrayAlphaImage::from_raw(width, height, bytes).map(Into::into),
        3 => RgbImage::from_raw(width, height, bytes).map(Into::into),
        _ => RgbaImage::from_raw(width, height, bytes).map(Into::into),
    }
    .ok_or_else(failed)
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
