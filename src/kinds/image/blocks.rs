//! What the blocks of a file say before anything in them is decoded: sizes and counts that the decoders keep to
//! themselves. In constant memory, and never past the file's end.

use super::vp8l;

/// Bytes for the coefficients of a JPEG that can't be decoded row by row, because it is progressive or its components
/// come one after the other: 0 for all others.
///
/// A file in which none is found is taken for the largest kind; decoding it fails anyway.
pub(super) fn jpeg_coefficients(file: &[u8], size: (u32, u32)) -> u64 {
    read_jpeg(file, size).unwrap_or(u64::from(size.0 + 32) * u64::from(size.1 + 32) * 8)
}

fn read_jpeg(file: &[u8], size: (u32, u32)) -> Option<u64> {
    let mut rest = file.get(2..)?;
    // horizontal and vertical sampling of each component, and whether it is progressive
    let mut frame: Option<(Vec<(u64, u64)>, bool)> = None;
    loop {
        let at = rest.windows(2).position(|pair| pair[0] == 0xff && !matches!(pair[1], 0 | 0xff))?;
        let marker = rest[at + 1];
        rest = &rest[at + 2..];
        if matches!(marker, 0x01 | 0xd0..=0xd9) {
            continue;
        }
        let length = usize::from(u16::from_be_bytes(*rest.first_chunk()?));
        let segment = rest.get(2..length)?;
        match marker {
            0xc0..=0xc2 if frame.is_some() => return None,
            0xc0..=0xc2 => {
                let components = segment.get(6..)?.chunks_exact(3);
                let sampling = components.map(|c| (u64::from(c[1] >> 4).max(1), u64::from(c[1] & 15).max(1)));
                frame = Some((sampling.take(usize::from(segment[5])).collect(), marker == 0xc2));
            }
            0xda => {
                let (sampling, progressive) = frame?;
                if !progressive && usize::from(*segment.first()?) == sampling.len() {
                    return Some(0);
                }
                let widest = sampling.iter().map(|(h, _)| *h).max()?;
                let highest = sampling.iter().map(|(_, v)| *v).max()?;
                let units = u64::from(size.0).div_ceil(8 * widest) * u64::from(size.1).div_ceil(8 * highest);
                // 64 numbers of 16 bits in a block
                return Some(sampling.iter().map(|(h, v)| units * h * v * 128).sum());
            }
            _ => {}
        }
        rest = &rest[length..];
    }
}

pub(super) struct Gif {
    /// Left, top, width, height.
    pub(super) first_frame: (u32, u32, u32, u32),
    pub(super) animated: bool,
}

/// None for a file without a frame.
pub(super) fn gif(file: &[u8]) -> Option<Gif> {
    let table = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
    let sub_blocks = |mut rest: &[u8]| -> Option<usize> {
        let all = rest.len();
        loop {
            let (length, after) = rest.split_first()?;
            rest = after.get(usize::from(*length)..)?;
            if *length == 0 {
                return Some(all - rest.len());
            }
        }
    };
    let mut rest = file.get(13 + table(*file.get(10)?)..)?;
    let mut first = None;
    loop {
        match (rest.first(), first) {
            // an extension: a label, then blocks
            (Some(0x21), _) => {
                let Some(length) = rest.get(2..).and_then(sub_blocks) else { break };
                rest = &rest[2 + length..];
            }
            (Some(0x2c), Some(_)) => return first.map(|first_frame| Gif { first_frame, animated: true }),
            (Some(0x2c), None) => {
                let head = rest.get(1..10)?;
                let number = |at: usize| u32::from(u16::from_le_bytes([head[at], head[at + 1]]));
                first = Some((number(0), number(2), number(4), number(6)));
                // the code size before the blocks
                let data = 10 + table(head[8]) + 1;
                let Some(length) = rest.get(data..).and_then(sub_blocks) else { break };
                rest = &rest[data + length..];
            }
            _ => break,
        }
    }
    first.map(|first_frame| Gif { first_frame, animated: false })
}

/// What the frames of a WebP are made of, all that may be the first one taken together.
#[derive(Debug, Default)]
pub(super) struct Webp {
    /// The largest width and height that a lossy frame itself claims.
    pub(super) lossy: Option<(u32, u32)>,
    pub(super) lossless: bool,
    /// Alpha beside a lossy frame.
    pub(super) alpha: bool,
    /// What the code tables of both take.
    pub(super) tables: u64,
}

pub(super) fn webp(file: &[u8], size: (u32, u32)) -> Webp {
    let mut found = Webp::default();
    scan_webp(file.get(12..).unwrap_or_default(), size, &mut found, None);
    found
}

/// `in_frame` says whether it is the first one. Of chunks of one kind the decoder takes the first, of frames too.
fn scan_webp(mut rest: &[u8], size: (u32, u32), found: &mut Webp, in_frame: Option<bool>) {
    let is_later = in_frame == Some(false);
    let (mut lossless, mut alpha, mut frames) = (is_later, is_later, false);
    while let Some((head, data)) = rest.split_first_chunk::<8>() {
        let length = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        match &head[..4] {
            b"VP8 " => {
                let side = |at: usize| match data.get(at..at + 2) {
                    Some(bytes) => u32::from(u16::from_le_bytes([bytes[0], bytes[1]]) & 0x3fff),
                    None => 0,
                };
                let (width, height) = found.lossy.unwrap_or_default();
                found.lossy = Some((width.max(side(6)), height.max(side(8))));
            }
            b"VP8L" => {
                found.lossless = true;
                if !std::mem::replace(&mut lossless, true) {
                    found.tables += vp8l::table_bytes(&data[..length.min(data.len())], size, false);
                }
            }
            b"ALPH" => {
                found.alpha = true;
                let is_compressed = data.first().is_some_and(|flags| flags & 3 == 1);
                if !std::mem::replace(&mut alpha, true) && is_compressed {
                    found.tables += vp8l::table_bytes(&data[1..length.clamp(1, data.len())], size, true);
                }
            }
            // a frame of an animation: chunks of its own after 16 bytes
            b"ANMF" if in_frame.is_none() => {
                let is_first = !std::mem::replace(&mut frames, true);
                let side = |at: usize| u32::from_le_bytes([data[at], data[at + 1], data[at + 2], 0]) + 1;
                if let Some(chunks) = data.get(16..length.min(data.len())) {
                    scan_webp(chunks, (side(6), side(9)), found, Some(is_first));
                }
            }
            _ => {}
        }
        let Some(after) = data.get(length.saturating_add(length % 2)..) else { return };
        rest = after;
    }
}
