//! Reads array elements in their most common form, eight bytes of text at a time.
//!
//! Each function reads an element with the separator after it, or returns nothing. [`Text`](crate::codecs::decode::fast_path::numbers::Text) reads
//! elements that are unusual, invalid or near the end of a body byte by byte. A body is mostly such elements, so these
//! functions use few instructions, and the position of an element's end depends on little more than its start.

/// Powers of ten for scaling decimals. Numbers that need larger powers are parsed by the exact method.
pub(super) const POWERS: [f64; 65] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22, 1e23, 1e24, 1e25, 1e26, 1e27, 1e28, 1e29, 1e30, 1e31, 1e32, 1e33, 1e34, 1e35, 1e36, 1e37, 1e38, 1e39,
    1e40, 1e41, 1e42, 1e43, 1e44, 1e45, 1e46, 1e47, 1e48, 1e49, 1e50, 1e51, 1e52, 1e53, 1e54, 1e55, 1e56, 1e57, 1e58,
    1e59, 1e60, 1e61, 1e62, 1e63, 1e64,
];

/// The bits of a 64-bit float's significand that do not fit in a 32-bit float.
pub(super) const LOST_BITS: u64 = (1 << 29) - 1;

/// The midpoint between two 32-bit floats, in those bits.
pub(super) const MIDDLE: u64 = 1 << 28;

/// An upper bound of the error of a scaled decimal, in units of the last place. The error comes from three roundings of
/// half a unit each.
const ERROR_UNITS: u64 = 4;

/// The factor for appending a number of digits, by that number.
const SHIFTS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// The largest numbers to which digits can be appended so that the result fits in 63 bits, by the number of digits.
const APPENDABLE: [u64; 9] = {
    let mut limits = SHIFTS;
    let mut count = 0;
    while count < limits.len() {
        limits[count] = i64::MAX as u64 / SHIFTS[count] - 1;
        count += 1;
    }
    limits
};

/// The separator between the elements of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Separator {
    /// `,`
    Comma,
    /// `, `
    CommaAndBlank,
}

impl Separator {
    /// The separator after the first element. Longer separators are not supported.
    pub(super) fn first_in(text: &[u8]) -> Self {
        match text.iter().take(32).skip_while(|&&byte| byte != b',').nth(1) {
            Some(b' ') => Self::CommaAndBlank,
            _ => Self::Comma,
        }
    }

    /// The length of the separator if it is present. One byte after a comma is checked as well.
    #[inline]
    fn length(self, after: [u8; 2]) -> Option<usize> {
        let blank = after[1] == b' ';
        (after[0] == b',' && blank == (self == Self::CommaAndBlank))
            .then_some(1 + usize::from(self == Self::CommaAndBlank))
    }
}

/// Reads an id of up to seven digits, and returns the length of its text.
#[inline]
pub(super) fn id(text: &[u8], separator: Separator) -> Option<(i32, usize)> {
    let text = text.first_chunk::<10>()?;
    let ones = word(text, 0);
    let count = digits_in(ones);
    let has_leading_zero = text[0] == b'0' && text[1] != b',';
    if count == 0 || count == 8 || has_leading_zero {
        return None;
    }
    let length = count + separator.length([text[count], text[count + 1]])?;
    Some((spelled(ones, count) as i32, length))
}

/// Reads a fraction with one digit before its point, rounded to the nearest 64-bit float and then to the nearest 32-bit
/// float, and returns the length of its text.
#[inline]
pub(super) fn fraction(text: &[u8], separator: Separator) -> Option<(f32, usize)> {
    // There are two branches because with a variable offset all following steps would have to wait for it.
    match text {
        [b'-', text @ ..] => magnitude(text, separator).map(|(number, length)| (-number, length + 1)),
        _ => magnitude(text, separator),
    }
}

#[expect(clippy::inline_always, reason = "two calls would cost a third more")]
#[inline(always)]
fn magnitude(text: &[u8], separator: Separator) -> Option<(f32, usize)> {
    let text = text.first_chunk::<32>()?;
    let whole = text[0].wrapping_sub(b'0');
    if whole > 9 || text[1] != b'.' {
        return None;
    }
    // The digits are read as up to three words. They may end only in the last one.
    let (mut number, mut before) = (u64::from(whole), 0);
    let mut ones = word(text, 2);
    let mut count = digits_in(ones);
    if count == 8 {
        number = number * SHIFTS[8] + eight_digits(ones);
        ones = word(text, 10);
        (count, before) = (digits_in(ones), 8);
        if count == 8 {
            number = number * SHIFTS[8] + eight_digits(ones);
            ones = word(text, 18);
            (count, before) = (digits_in(ones), 16);
        }
    }
    let digits = before + count;
    if count == 8 || digits == 0 || number > APPENDABLE[count] {
        return None;
    }
    let number = (number * SHIFTS[count] + if count == 0 { 0 } else { spelled(ones, count) }) as i64;
    let end = 2 + digits;
    let (power, end) =
        if text[end] == b'e' { (digits + small_exponent(text.get(end + 1..)?)?, end + 4) } else { (digits, end) };
    let magnitude = number as f64 / POWERS.get(power)?;
    // Only a number with an exponent can be this small.
    let is_normal = power == digits || magnitude >= f64::from(f32::MIN_POSITIVE);
    if !is_normal || !is_clear(magnitude) {
        return None;
    }
    Some((magnitude as f32, end + separator.length([*text.get(end)?, *text.get(end + 1)?])?))
}

/// Whether a scaled decimal is far enough from the midpoint between two 32-bit floats that its error cannot change the
/// rounding.
#[inline]
pub(super) fn is_clear(magnitude: f64) -> bool {
    (magnitude.to_bits().wrapping_sub(MIDDLE - ERROR_UNITS) & LOST_BITS) > 2 * ERROR_UNITS
}

/// Reads `N` of an exponent `-N` with two digits.
fn small_exponent(text: &[u8]) -> Option<usize> {
    match text {
        &[b'-', tens @ b'0'..=b'9', ones @ b'0'..=b'9', ..] => {
            Some(10 * usize::from(tens - b'0') + usize::from(ones - b'0'))
        }
        _ => None,
    }
}

/// Reads eight bits of a mask, each followed by a separator of `STRIDE - 1` bytes.
#[inline]
pub(super) fn bits<const STRIDE: usize>(text: &[u8]) -> Option<[u8; 8]> {
    let (words, _) = text.as_chunks::<8>();
    let words: &[[u8; 8]; STRIDE] = words.try_into().ok()?;
    // XOR with a text of zeros and separators: for valid text, each digit leaves its bit and each separator leaves
    // zero.
    let bytes = |at: usize, byte: fn(usize) -> u8| {
        u64::from_le_bytes(std::array::from_fn(|place| byte((8 * at + place) % STRIDE)))
    };
    let left: [u64; STRIDE] =
        std::array::from_fn(|at| u64::from_le_bytes(words[at]) ^ bytes(at, |place| b"0, "[place]));
    let odd = (0..STRIDE).fold(0, |odd, at| odd | left[at] & !bytes(at, |place| u8::from(place == 0)));
    (odd == 0).then(|| std::array::from_fn(|bit| (left[bit * STRIDE / 8] >> (bit * STRIDE % 8 * 8)) as u8))
}

/// Counts the leading digits of eight bytes, and returns the number that they represent.
#[inline]
pub(super) fn leading_digits(text: [u8; 8]) -> (usize, u64) {
    let ones = word(&text, 0);
    let count = digits_in(ones);
    (count, if count == 0 { 0 } else { spelled(ones, count) })
}

/// Appends `count` digits to a number.
#[inline]
pub(super) fn appended(number: u64, count: usize, digits: u64) -> u64 {
    number.wrapping_mul(SHIFTS[count]).wrapping_add(digits)
}

/// Loads eight bytes of text as a word in which each digit's byte has the digit's value.
#[inline]
fn word<const BYTES: usize>(text: &[u8; BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&text[at..at + 8]);
    u64::from_le_bytes(word) ^ 0x3030_3030_3030_3030
}

/// Counts the leading digits of a word.
#[inline]
fn digits_in(ones: u64) -> usize {
    // This sets the highest bit of each byte that is not a digit. A carry only changes bytes after the first such byte.
    let others = (ones | ones.wrapping_add(0x7676_7676_7676_7676)) & 0x8080_8080_8080_8080;
    (others.trailing_zeros() / 8) as usize
}

/// The number that the first `count` digits of a word represent. `count` must not be 0.
#[inline]
fn spelled(ones: u64, count: usize) -> u64 {
    // The shift puts zeros before the digits, which do not change the number, and drops the bytes after the digits.
    eight_digits(ones.wrapping_shl(64 - 8 * count as u32))
}

/// The number that eight digits represent. Digits are combined into pairs, fours and eights in the lanes of a word,
/// without a branch (D. Lemire, "Number parsing at a gigabyte per second", 2021, section 4).
#[inline]
fn eight_digits(ones: u64) -> u64 {
    let pairs = ones.wrapping_mul(10).wrapping_add(ones >> 8);
    let low = (pairs & 0x0000_00FF_0000_00FF).wrapping_mul(100 + (1_000_000 << 32));
    let high = ((pairs >> 16) & 0x0000_00FF_0000_00FF).wrapping_mul(1 + (10_000 << 32));
    low.wrapping_add(high) >> 32
}
