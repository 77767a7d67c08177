//! What a picture is, and how much memory resizing it takes, told from its header alone.
//!
//! The numbers are upper bounds over what the decoders and encoders in use allocate, by their sources: what they hold
//! beside the decoded pixels is in [`Header::beside`], and `tests/kinds/memory.rs` measures the sum.

use std::io::Cursor;

use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{ColorType, ImageDecoder, ImageError, ImageFormat, ImageReader, Limits};
use moxcms::ColorProfile;

use super::pixels::{Fit, Format, Wanted};
use super::{blocks, colour};
use crate::kinds::Failure;

/// Width times height of a source, decoded: a 50-megapixel camera.
pub(super) const MAX_SOURCE_PIXELS: u64 = 50_000_000;
const MAX_SOURCE_SIDE: u32 = 20_000;
/// What a decoder may allocate beside the pixels for colour profiles and the like, more than the source is large.
const MAX_METADATA_BYTES: u64 = 8 * 1024 * 1024;
/// Rows, tables, stacks.
const SMALL_THINGS: u64 = 4 * 1024 * 1024;

#[derive(Debug)]
pub(super) struct Header {
    pub(super) kind: ImageFormat,
    pub(super) width: u32,
    pub(super) height: u32,
    pub(super) color: ColorType,
    /// How the stored picture is to be turned.
    pub(super) orientation: Orientation,
    /// Of its colours, where it has one.
    pub(super) profile: Option<Box<ColorProfile>>,
    /// There are more frames than the first.
    pub(super) animated: bool,
    /// What decoding allocates beside the pixels it gives, the source itself aside.
    beside: u64,
}

/// A part of the source: left, top, width, height.
pub(super) type Crop = (f64, f64, f64, f64);

/// What is made of a picture. Sizes and crop are those of the picture as it is stored, before it is turned.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) target: (u32, u32),
    pub(super) crop: Crop,
    pub(super) format: Format,
    pub(super) columns_first: bool,
}

impl Header {
    /// # Errors
    /// Permanent `ImageUnsupported`, `ImageInvalid` or `ImageTooLarge`.
    pub(super) fn read(source: &[u8]) -> Result<Self, Failure> {
        let unsupported = || Failure::permanent("ImageUnsupported", "the source is no PNG, JPEG, WebP or GIF picture");
        let kind = image::guess_format(source).map_err(|_| unsupported())?;
        if !matches!(kind, ImageFormat::Png | ImageFormat::Jpeg | ImageFormat::WebP | ImageFormat::Gif) {
            return Err(unsupported());
        }
        let source_bytes = source.len() as u64;
        let mut decoder = decoder(source, kind, 0)?;
        let ((width, height), color) = (decoder.dimensions(), decoder.color_type());
        if width == 0 || height == 0 {
            return Err(Failure::permanent("ImageInvalid", "the picture has no pixels"));
        }
        let pixels = u64::from(width) * u64::from(height);
        if pixels > MAX_SOURCE_PIXELS {
            return Err(too_many_pixels());
        }
        // a picture whose orientation can't be read is shown as it is stored, as browsers do
        let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
        // in a PNG it is compressed, and bounded by what a decoder may allocate
        let profile = colour::profile(decoder.icc_profile().ok().flatten(), color.channel_count());
        drop(decoder);
        let damaged = || Failure::permanent("ImageInvalid", "the picture is damaged or incomplete");
        let (beside, animated) = match kind {
            // its own copy of the source, and of the metadata in it
            ImageFormat::Jpeg => (2 * source_bytes + blocks::jpeg_coefficients(source, (width, height)), false),
            ImageFormat::Png => {
                let decoder = PngDecoder::with_limits(Cursor::new(source), limits(source, 0));
                (source_bytes, decoder.is_ok_and(|decoder| decoder.is_apng().unwrap_or(false)))
            }
            ImageFormat::Gif => {
                let blocks::Gif { first_frame, animated } = blocks::gif(source).ok_or_else(damaged)?;
                let (left, top, frame_width, frame_height) = first_frame;
                let in_place = left == 0 && frame_width == width && top + frame_height <= height;
                (if in_place { 0 } else { 4 * u64::from(frame_width) * u64::from(frame_height) }, animated)
            }
            // WebP
            _ => {
                let blocks::Webp { lossy, lossless, alpha, tables } = blocks::webp(source, (width, height));
                // the decoder would find out after it has decoded it
                if lossy.is_some_and(|(w, h)| w > width || h > height) {
                    return Err(damaged());
                }
                let animated = WebPDecoder::new(Cursor::new(source)).is_ok_and(|decoder| decoder.has_animation());
                // Y, U and V
                let planes = u64::from(width + 16) * u64::from(height + 16) * 3 / 2;
                let beside = [
                    (lossy.is_some(), planes),
                    // decoded as four channels, of which one is kept
                    (alpha, 5 * pixels),
                    // four channels, of which three may be kept, and the images of its transforms
                    (lossless, 5 * pixels),
                    // the frame and what it is laid on
                    (animated, 8 * pixels),
                ];
                let beside: u64 = beside.iter().filter(|(is, _)| *is).map(|(_, bytes)| bytes).sum();
                (source_bytes + tables + beside, animated)
            }
        };
        Ok(Self { kind, width, height, color, orientation, profile, animated, beside })
    }

    pub(super) fn plan(&self, wanted: Wanted) -> Plan {
        let Wanted { size, fit, format } = wanted;
        let own = match self.kind {
            ImageFormat::Jpeg => Format::Jpeg,
            ImageFormat::WebP => Format::Webp,
            _ => Format::Png,
        };
        // The result is turned, not the source: it is smaller, as a rule, and the filter is the same both ways.
        let (target, crop) = if turns_sideways(self.orientation) {
            let ((width, height), (left, top, crop_width, crop_height)) =
                geometry((self.height, self.width), size, fit);
            ((height, width), (top, left, crop_height, crop_width))
        } else {
            geometry((self.width, self.height), size, fit)
        };
        let columns_first = crop.2 * f64::from(target.1) > MAX_SOURCE_PIXELS as f64;
        Plan { target, crop, format: format.unwrap_or(own), columns_first }
    }

    pub(super) fn decoded_bytes(&self) -> u64 {
        u64::from(self.width) * u64::from(self.height) * u64::from(self.color.bytes_per_pixel())
    }

    /// The most that resizing holds at once, the source aside.
    pub(super) fn peak_bytes(&self, plan: &Plan) -> u64 {
        let channels = u64::from(self.color.channel_count());
        let source = u64::from(self.width) * u64::from(self.height) * channels;
        let target = u64::from(plan.target.0) * u64::from(plan.target.1);
        let between = if plan.columns_first {
            u64::from(plan.target.0) * u64::from(self.height)
        } else {
            u64::from(self.width) * u64::from(plan.target.1)
        };
        let decode = self.decoded_bytes() + self.beside;
        let resize = source + (between + target) * channels;
        let encode = target
            * match plan.format {
                // compressed row by row, then copied into the file; noise does not get smaller
                Format::Png => channels * 13 / 4 + 1,
                Format::Jpeg => channels + 3 + 3,
                // four channels, and then as with PNG
                Format::Webp => channels + 8,
            };
        let turn = 2 * target * channels;
        decode.max(resize).max(encode).max(turn) + SMALL_THINGS
    }

    /// The decoder of the same source.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub(super) fn decoder<'a>(&self, source: &'a [u8]) -> Result<impl ImageDecoder + 'a, Failure> {
        decoder(source, self.kind, self.beside)
    }
}

fn decoder(source: &[u8], kind: ImageFormat, beside: u64) -> Result<impl ImageDecoder + '_, Failure> {
    let mut reader = ImageReader::with_format(Cursor::new(source), kind);
    reader.limits(limits(source, beside));
    reader.into_decoder().map_err(|error| describe(&error))
}

fn limits(source: &[u8], beside: u64) -> Limits {
    let mut limits = Limits::default();
    limits.max_image_width = Some(MAX_SOURCE_SIDE);
    limits.max_image_height = Some(MAX_SOURCE_SIDE);
    limits.max_alloc = Some(source.len() as u64 + MAX_METADATA_BYTES + beside);
    limits
}

fn turns_sideways(orientation: Orientation) -> bool {
    match orientation {
        Orientation::Rotate90 | Orientation::Rotate270 | Orientation::Rotate90FlipH | Orientation::Rotate270FlipH => {
            true
        }
        Orientation::NoTransforms
        | Orientation::Rotate180
        | Orientation::FlipHorizontal
        | Orientation::FlipVertical => false,
    }
}

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

fn too_many_pixels() -> Failure {
    Failure::permanent("ImageTooLarge", "the picture has more than 50 million pixels or a side over 20000")
}

/// A picture that can't be decoded today can't be tomorrow: all of these are permanent.
pub(super) fn describe(error: &ImageError) -> Failure {
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
