//! Colours as the web takes them: what a picture's own profile says is converted to sRGB, and the profile left out.

use image::DynamicImage;
use moxcms::{ColorProfile, DataColorSpace, Layout, TransformOptions};

/// Larger profiles than any in use: what converting by them takes is not reserved.
const MAX_PROFILE_BYTES: usize = 2 * 1024 * 1024;
/// How many pixels are converted at once.
const STRETCH: usize = 4096;

/// A profile for pixels of so many channels; none where it can't be read or is for another kind of pixels (a CMYK JPEG
/// comes out of its decoder as RGB): such a picture is taken for sRGB, as browsers do.
pub(super) fn profile(bytes: Option<Vec<u8>>, channels: u8) -> Option<Box<ColorProfile>> {
    let profile = ColorProfile::new_from_slice(&bytes.filter(|bytes| bytes.len() <= MAX_PROFILE_BYTES)?).ok()?;
    let wanted = if channels < 3 { DataColorSpace::Gray } else { DataColorSpace::Rgb };
    (profile.color_space == wanted).then(|| Box::new(profile))
}

/// In place; a profile that makes no sense changes nothing.
pub(super) fn to_srgb(picture: &mut DynamicImage, profile: &ColorProfile) {
    let srgb = ColorProfile::new_srgb();
    let mut grey = ColorProfile::new_gray_with_gamma(2.2);
    grey.gray_trc = srgb.red_trc.clone();
    let (layout, channels, wanted, bytes): (_, _, _, &mut [u8]) = match picture {
        DynamicImage::ImageLuma8(picture) => (Layout::Gray, 1, &grey, picture),
        DynamicImage::ImageLumaA8(picture) => (Layout::GrayAlpha, 2, &grey, picture),
        DynamicImage::ImageRgb8(picture) => (Layout::Rgb, 3, &srgb, picture),
        DynamicImage::ImageRgba8(picture) => (Layout::Rgba, 4, &srgb, picture),
        _ => return,
    };
    let options = TransformOptions::default();
    let Ok(transform) = profile.create_transform_8bit(layout, wanted, layout, options) else { return };
    let mut converted = vec![0; STRETCH * channels];
    for stretch in bytes.chunks_mut(STRETCH * channels) {
        let converted = &mut converted[..stretch.len()];
        if transform.transform(stretch, converted).is_err() {
            return;
        }
        stretch.copy_from_slice(converted);
    }
}
