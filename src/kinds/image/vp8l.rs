//! How much memory the code tables of a lossless WebP take, told before it is decoded.
//!
//! A picture may have 65536 sets of five prefix codes, and a code that takes eight bytes in the file takes 70 KiB as a
//! table. How many sets there are stands in a small picture within the picture, behind others that have to be read to get
//! past them; so this reads a lossless WebP as far as its codes and no further. By RFC 9649, section 3 (the format), and
//! the image-webp crate (what a table takes). What can't be read here, that decoder refuses as well.

use std::collections::BTreeSet;
use std::sync::LazyLock;

/// More is not counted: no worker has it.
const ENOUGH: u64 = 8 << 30;
/// What a set takes by itself, as it is moved to a larger list, and as so many allocations.
const SET_BYTES: u64 = 1024;
/// The order in which lengths of the code lengths' own code are written.
const LENGTHS_ORDER: [usize; 19] = [17, 18, 0, 1, 2, 3, 4, 5, 16, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
const LONGEST: usize = 15;
/// Codes of up to so many bits are looked up in a list, the others in a tree behind it.
const LISTED: usize = 10;
const GREEN: u16 = 256;
const LENGTHS: u16 = 24;
const DISTANCES: u16 = 40;

/// The bytes that the code tables of a picture take. `stream` begins with the signature, or, for the alpha of another
/// picture, right behind it.
pub(super) fn table_bytes(stream: &[u8], size: (u32, u32), is_alpha: bool) -> u64 {
    let mut reader = Reader { stream, at: 0, tables: 0 };
    // As far as it can be read.
    _ = reader.picture((size.0 as usize, size.1 as usize), is_alpha);
    reader.tables
}

struct Reader<'a> {
    stream: &'a [u8],
    /// In bits.
    at: usize,
    tables: u64,
}

/// A prefix code, in canonical form.
enum Code {
    /// Takes no bits.
    One(u16),
    /// How many of each length, and the symbols in the order of their codes.
    Many([u16; LONGEST + 1], Vec<u16>),
}

impl Reader<'_> {
    fn picture(&mut self, (mut width, height): (usize, usize), is_alpha: bool) -> Option<()> {
        if !is_alpha {
            // signature, width, height, whether there is alpha, version
            (self.bits(8)? == 0x2f).then_some(())?;
            let own = (self.bits(14)? as usize + 1, self.bits(14)? as usize + 1);
            (own == (width, height) && self.bits(4)? >> 1 == 0).then_some(())?;
        }
        let mut known = BTreeSet::new();
        while self.bits(1)? == 1 {
            let kind = self.bits(2)?;
            known.insert(kind).then_some(())?;
            match kind {
                0 | 1 => {
                    let bits = self.bits(3)? + 2;
                    self.part(blocks(width, bits), blocks(height, bits))?;
                }
                3 => {
                    let colours = self.bits(8)? as usize + 1;
                    self.part(colours, 1)?;
                    width = blocks(
                        width,
                        match colours {
                            0..=2 => 3,
                            3..=4 => 2,
                            5..=16 => 1,
                            _ => 0,
                        },
                    );
                }
                _ => {}
            }
        }
        let cache = self.cache_bits()?;
        let sets = if self.bits(1)? == 1 {
            let bits = self.bits(3)? + 2;
            let choice = self.part(blocks(width, bits), blocks(height, bits))?;
            // red and green together are the number of a set
            choice.iter().map(|pixel| pixel >> 8 & 0xffff).max()? + 1
        } else {
            1
        };
        for _ in 0..sets {
            self.set(cache)?;
            (self.tables < ENOUGH).then_some(())?;
        }
        Some(())
    }

    /// A picture that is part of how the whole one is written; its tables go before the next ones come. Pixels as
    /// 0xAARRGGBB.
    fn part(&mut self, width: usize, height: usize) -> Option<Vec<u32>> {
        let cache_bits = self.cache_bits()?;
        let tables = self.tables;
        let [green, red, blue, alpha, distance] = self.set(cache_bits)?;
        self.tables = tables;
        let mut cache = vec![0; if cache_bits == 0 { 0 } else { 1 << cache_bits }];
        let total = width * height;
        let mut pixels: Vec<u32> = Vec::new();
        let push = |pixels: &mut Vec<u32>, cache: &mut Vec<u32>, pixel: u32| {
            if cache_bits > 0 {
                cache[(0x1e35_a7bd_u32.wrapping_mul(pixel) >> (32 - cache_bits)) as usize] = pixel;
            }
            pixels.push(pixel);
        };
        while pixels.len() < total {
            let symbol = self.symbol(&green)?;
            if symbol < GREEN {
                let [red, blue, alpha] = [self.symbol(&red)?, self.symbol(&blue)?, self.symbol(&alpha)?].map(u32::from);
                push(&mut pixels, &mut cache, alpha << 24 | red << 16 | u32::from(symbol) << 8 | blue);
            } else if symbol < GREEN + LENGTHS {
                let length = self.number(symbol - GREEN)?;
                let code = self.symbol(&distance)?;
                let back = far(self.number(code)?, width);
                let from = pixels.len().checked_sub(back)?;
                (pixels.len() + length <= total).then_some(())?;
                for at in from..from + length {
                    let pixel = pixels[at];
                    push(&mut pixels, &mut cache, pixel);
                }
            } else {
                let pixel = *cache.get(usize::from(symbol - GREEN - LENGTHS))?;
                push(&mut pixels, &mut cache, pixel);
            }
        }
        Some(pixels)
    }

    fn cache_bits(&mut self) -> Option<u32> {
        if self.bits(1)? == 0 {
            return Some(0);
        }
        let bits = self.bits(4)?;
        (1..=11).contains(&bits).then_some(bits)
    }

    fn set(&mut self, cache_bits: u32) -> Option<[Code; 5]> {
        self.tables += SET_BYTES;
        let cached = if cache_bits == 0 { 0 } else { 1 << cache_bits };
        Some([
            self.code(GREEN + LENGTHS + cached)?,
            self.code(256)?,
            self.code(256)?,
            self.code(256)?,
            self.code(DISTANCES)?,
        ])
    }

    /// A code for so many symbols; counts what its table will take.
    fn code(&mut self, symbols: u16) -> Option<Code> {
        if self.bits(1)? == 1 {
            let two = self.bits(1)? == 1;
            let wide = self.bits(1)?;
            let zero = self.bits(1 + 7 * wide)? as u16;
            if !two {
                return (zero < symbols).then_some(Code::One(zero));
            }
            let one = self.bits(8)? as u16;
            let mut counts = [0; LONGEST + 1];
            counts[1] = 2;
            self.tables += 64;
            return (zero.max(one) < symbols).then(|| Code::Many(counts, vec![zero, one]));
        }
        let mut lengths = [0; LENGTHS_ORDER.len()];
        let written = 4 + self.bits(4)? as usize;
        for at in LENGTHS_ORDER.iter().take(written) {
            lengths[*at] = self.bits(3)? as u8;
        }
        let lengths = self.lengths(&Code::canonical(&lengths)?, symbols)?;
        let code = Code::canonical(&lengths)?;
        self.tables += code.table_bytes();
        Some(code)
    }

    fn lengths(&mut self, code: &Code, symbols: u16) -> Option<Vec<u8>> {
        let mut left = symbols;
        if self.bits(1)? == 1 {
            let bits = 2 + 2 * self.bits(3)?;
            left = u16::try_from(self.bits(bits)?).ok().filter(|more| *more <= symbols - 2)? + 2;
        }
        if let Code::One(length @ 0..16) = code {
            return Some(vec![*length as u8; left.min(symbols).into()]);
        }
        let mut lengths: Vec<u8> = Vec::with_capacity(symbols.into());
        let mut last = 8;
        while lengths.len() < symbols.into() && left > 0 {
            left -= 1;
            let (length, times) = match self.symbol(code)? {
                16 => (last, self.bits(2)? + 3),
                17 => (0, self.bits(3)? + 3),
                18 => (0, self.bits(7)? + 11),
                length => (length as u8, 1),
            };
            if length != 0 {
                last = length;
            }
            lengths.resize(lengths.len() + times as usize, length);
        }
        (lengths.len() <= symbols.into()).then_some(lengths)
    }

    fn symbol(&mut self, code: &Code) -> Option<u16> {
        let (counts, symbols) = match code {
            Code::One(symbol) => return Some(*symbol),
            Code::Many(counts, symbols) => (counts, symbols),
        };
        let (mut code, mut first, mut before) = (0, 0, 0);
        for count in &counts[1..] {
            code |= self.bits(1)?;
            let count = u32::from(*count);
            if code < first + count {
                return symbols.get((before + code - first) as usize).copied();
            }
            before += count;
            first = (first + count) << 1;
            code <<= 1;
        }
        None
    }

    /// A length or a distance: the symbol says how large, further bits the rest.
    fn number(&mut self, symbol: u16) -> Option<usize> {
        let symbol = u32::from(symbol);
        if symbol < 4 {
            return Some(symbol as usize + 1);
        }
        let bits = (symbol - 2) >> 1;
        Some((((2 + (symbol & 1)) << bits) + self.bits(bits)? + 1) as usize)
    }

    fn bits(&mut self, count: u32) -> Option<u32> {
        let mut value = 0;
        for bit in 0..count {
            let byte = *self.stream.get(self.at / 8)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << bit;
            self.at += 1;
        }
        Some(value)
    }
}

impl Code {
    /// None where the lengths make no complete code.
    fn canonical(lengths: &[u8]) -> Option<Self> {
        let mut counts = [0; LONGEST + 1];
        let used = || lengths.iter().enumerate().filter(|(_, length)| **length > 0);
        for (_, length) in used() {
            counts[usize::from(*length)] += 1;
        }
        let mut symbols: Vec<(u8, u16)> = used().map(|(symbol, length)| (*length, symbol as u16)).collect();
        if let [(_, only)] = symbols[..] {
            return Some(Self::One(only));
        }
        let room: u32 = counts.iter().enumerate().skip(1).map(|(length, n)| u32::from(*n) << (LONGEST - length)).sum();
        (room == 1 << LONGEST).then_some(())?;
        symbols.sort_unstable();
        Some(Self::Many(counts, symbols.into_iter().map(|(_, symbol)| symbol).collect()))
    }

    fn table_bytes(&self) -> u64 {
        let Self::Many(counts, _) = self else { return 0 };
        let longest = counts.iter().rposition(|count| *count > 0).unwrap_or_default();
        let in_tree: u64 = counts[LISTED.min(longest) + 1..].iter().map(|count| u64::from(*count)).sum();
        (4 << LISTED.min(longest)) + 2 * 16 * in_tree
    }
}

/// How many blocks of 2^bits pixels a side takes.
fn blocks(side: usize, bits: u32) -> usize {
    side.div_ceil(1 << bits)
}

/// How many pixels back a distance is: the first 120 stand for places near by (RFC 9649, section 3.6.2.2).
fn far(distance: usize, width: usize) -> usize {
    match PLACES.get(distance - 1) {
        Some((left, above)) => usize::try_from(left + above * width as isize).unwrap_or(0).max(1),
        None => distance - PLACES.len(),
    }
}

/// Columns to the left and rows above, the nearest first, of those equally near the ones with the fewest columns.
static PLACES: LazyLock<Vec<(isize, isize)>> = LazyLock::new(|| {
    let rows = (0..8).flat_map(|above| (-7..=8).map(move |left| (left, above)));
    let mut places: Vec<(isize, isize)> = rows.filter(|(left, above)| *above > 0 || *left > 0).collect();
    places.sort_by_key(|(left, above)| (left * left + above * above, left.abs(), *left < 0));
    places
});

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Bits, the lowest first.
    #[derive(Default)]
    struct Writer(Vec<bool>);

    impl Writer {
        fn put(&mut self, value: u32, bits: u32) -> &mut Self {
            self.0.extend((0..bits).map(|bit| value.checked_shr(bit).is_some_and(|rest| rest & 1 == 1)));
            self
        }

        /// A code of this symbol alone.
        fn only(&mut self, symbol: u32) -> &mut Self {
            self.put(0b101, 3).put(symbol, 8)
        }

        fn bytes(&self) -> Vec<u8> {
            let byte = |bits: &[bool]| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit));
            self.0.chunks(8).map(byte).collect()
        }
    }

    /// 4 x 4 pixels, all by the last of so many sets, each of which has a code of 2048 symbols of 11 bits.
    pub(in crate::kinds::image) fn bomb(sets: u32) -> Vec<u8> {
        let mut writer = Writer::default();
        // size, no alpha, version; no transform; a cache of 2048 colours; sets chosen by blocks of 4 x 4
        writer.put(0x2f, 8).put(3, 14).put(3, 14).put(0, 4).put(0, 1).put(1, 1).put(11, 4).put(1, 1).put(0, 3);
        let last = sets - 1;
        writer.put(0, 1).only(last & 0xff).only(last >> 8).only(0).only(0).only(0);
        for _ in 0..sets {
            // lengths have a code of 11 alone, and 2048 of them are written
            writer.put(0, 1).put(11, 4).put(0, 42).put(1, 3).put(1, 1).put(5, 3).put(2046, 12);
            writer.only(0).only(0).only(0).only(0);
        }
        let stream = writer.put(0, 16 * 11).bytes();
        let length = u32::try_from(stream.len()).unwrap();
        let padding = vec![0; stream.len() % 2];
        let whole = 12 + length + length % 2;
        [b"RIFF", &whole.to_le_bytes(), b"WEBP", b"VP8L", &length.to_le_bytes(), &stream[..], &padding].concat()
    }

    #[test]
    fn places_near_by_are_those_of_the_format() {
        let first = [(0, 1), (1, 0), (1, 1), (-1, 1), (0, 2), (2, 0), (1, 2), (-1, 2), (2, 1), (-2, 1)];
        assert_eq!(PLACES[..10], first);
        assert_eq!((PLACES.len(), PLACES[118], PLACES[119]), (120, (8, 6), (8, 7)));
    }

    #[test]
    fn pictures_of_another_encoder_are_read_to_the_end_of_their_codes() {
        let pictures: [(&[u8], usize, usize, bool); 3] = [
            (include_bytes!("../../../tests/data/sets.webp"), 20, 5, false),
            (include_bytes!("../../../tests/data/palette.webp"), 20, 0, false),
            (include_bytes!("../../../tests/data/alpha.webp"), 39, 1, true),
        ];
        for (file, at, sets, is_alpha) in pictures {
            let mut reader = Reader { stream: &file[at..], at: 0, tables: 0 };
            reader.picture((160, 120), is_alpha).expect("it can be read");
            assert!(reader.tables >= sets as u64 * SET_BYTES && reader.at / 8 < reader.stream.len());
        }
    }

    #[test]
    fn every_set_counts_and_a_scrap_counts_as_far_as_it_goes() {
        let of = |sets| table_bytes(&bomb(sets)[20..], (4, 4), false);
        assert_eq!(of(1), SET_BYTES + 4096 + 65536);
        assert_eq!(of(300), 300 * of(1));
        let bomb = bomb(300);
        let half = table_bytes(&bomb[20..bomb.len() / 2], (4, 4), false);
        assert!(half > 140 * of(1) && half < 160 * of(1));
        assert_eq!(table_bytes(&bomb[20..], (5, 4), false), 0);
        assert_eq!(table_bytes(b"", (4, 4), true), 0);
    }
}
