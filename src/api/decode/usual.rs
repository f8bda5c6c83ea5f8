//! Elements of arrays in the form in which nearly all are written, eight bytes of text at a time.
//!
//! Each function takes an element with the separator behind it, or nothing: what is rare, wrong or near the end of a
//! body is for [`Text`](super::numbers::Text) to read byte by byte. A body is mostly such elements, so these are written
//! for few instructions, and such that where an element ends depends on little else than where it began.

/// Powers of ten that a decimal is scaled by; the exact way reads what needs larger ones.
pub(super) const POWERS: [f64; 65] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22, 1e23, 1e24, 1e25, 1e26, 1e27, 1e28, 1e29, 1e30, 1e31, 1e32, 1e33, 1e34, 1e35, 1e36, 1e37, 1e38, 1e39,
    1e40, 1e41, 1e42, 1e43, 1e44, 1e45, 1e46, 1e47, 1e48, 1e49, 1e50, 1e51, 1e52, 1e53, 1e54, 1e55, 1e56, 1e57, 1e58,
    1e59, 1e60, 1e61, 1e62, 1e63, 1e64,
];

/// Bits of a 64-bit float's significand that a 32-bit float has no place for.
pub(super) const LOST_BITS: u64 = (1 << 29) - 1;

/// The middle between two 32-bit floats, in those bits.
pub(super) const MIDDLE: u64 = 1 << 28;

/// How far from the true value a scaled decimal may be, in units of the last place: three roundings of half a unit.
const ERROR_UNITS: u64 = 4;

/// What a number is multiplied by when so many digits are appended.
const SHIFTS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// Numbers that so many digits can be appended to, such that they still fit 63 bits.
const APPENDABLE: [u64; 9] = {
    let mut limits = SHIFTS;
    let mut count = 0;
    while count < limits.len() {
        limits[count] = i64::MAX as u64 / SHIFTS[count] - 1;
        count += 1;
    }
    limits
};

/// What stands between the elements of an array.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Separator {
    /// `,`
    Comma,
    /// `, `
    CommaAndBlank,
}

impl Separator {
    /// The one behind the first element; a longer one is not usual.
    pub(super) fn first_in(text: &[u8]) -> Self {
        match text.iter().take(32).skip_while(|&&byte| byte != b',').nth(1) {
            Some(b' ') => Self::CommaAndBlank,
            _ => Self::Comma,
        }
    }

    /// Its length, if it stands there; one byte more than a comma is looked at.
    #[inline]
    fn length(self, after: [u8; 2]) -> Option<usize> {
        let blank = after[1] == b' ';
        (after[0] == b',' && blank == (self == Self::CommaAndBlank))
            .then_some(1 + usize::from(self == Self::CommaAndBlank))
    }
}

/// An id of up to seven digits, and the length of its text.
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

/// A fraction with one digit before its point, as the nearest 64-bit float, and that as the nearest 32-bit float; and
/// the length of its text.
#[inline]
pub(super) fn fraction(text: &[u8], separator: Separator) -> Option<(f32, usize)> {
    // Two ways instead of one with an offset, which all else would have to wait for.
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
    // Three words: only in the last one digits end.
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
    // Only an exponent makes it so small.
    let is_normal = power == digits || magnitude >= f64::from(f32::MIN_POSITIVE);
    if !is_normal || !is_clear(magnitude) {
        return None;
    }
    Some((magnitude as f32, end + separator.length([*text.get(end)?, *text.get(end + 1)?])?))
}

/// Whether a scaled decimal is so far from the middle between two 32-bit floats that its error does not matter.
#[inline]
pub(super) fn is_clear(magnitude: f64) -> bool {
    (magnitude.to_bits().wrapping_sub(MIDDLE - ERROR_UNITS) & LOST_BITS) > 2 * ERROR_UNITS
}

/// `N` of the exponent `-N`, written with two digits.
fn small_exponent(text: &[u8]) -> Option<usize> {
    match text {
        &[b'-', tens @ b'0'..=b'9', ones @ b'0'..=b'9', ..] => {
            Some(10 * usize::from(tens - b'0') + usize::from(ones - b'0'))
        }
        _ => None,
    }
}

/// Eight bits of a mask, each with a separator of `STRIDE - 1` bytes behind it.
#[inline]
pub(super) fn bits<const STRIDE: usize>(text: &[u8]) -> Option<[u8; 8]> {
    let (words, _) = text.as_chunks::<8>();
    let words: &[[u8; 8]; STRIDE] = words.try_into().ok()?;
    // What is left of each byte where it is what it should be: the bit of a digit, nothing of a separator.
    let bytes = |at: usize, byte: fn(usize) -> u8| {
        u64::from_le_bytes(std::array::from_fn(|place| byte((8 * at + place) % STRIDE)))
    };
    let left: [u64; STRIDE] =
        std::array::from_fn(|at| u64::from_le_bytes(words[at]) ^ bytes(at, |place| b"0, "[place]));
    let odd = (0..STRIDE).fold(0, |odd, at| odd | left[at] & !bytes(at, |place| u8::from(place == 0)));
    (odd == 0).then(|| std::array::from_fn(|bit| (left[bit * STRIDE / 8] >> (bit * STRIDE % 8 * 8)) as u8))
}

/// How many of eight bytes are digits from the first on, and the number that those spell.
#[inline]
pub(super) fn leading_digits(text: [u8; 8]) -> (usize, u64) {
    let ones = word(&text, 0);
    let count = digits_in(ones);
    (count, if count == 0 { 0 } else { spelled(ones, count) })
}

/// A number with so many digits appended.
#[inline]
pub(super) fn appended(number: u64, count: usize, digits: u64) -> u64 {
    number.wrapping_mul(SHIFTS[count]).wrapping_add(digits)
}

/// Eight bytes of text, each with the value of its digit where it is one.
#[inline]
fn word<const BYTES: usize>(text: &[u8; BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&text[at..at + 8]);
    u64::from_le_bytes(word) ^ 0x3030_3030_3030_3030
}

/// How many bytes of a word are digits from the first on.
#[inline]
fn digits_in(ones: u64) -> usize {
    // The highest bit of each byte that is no digit; a carry only reaches bytes after one.
    let others = (ones | ones.wrapping_add(0x7676_7676_7676_7676)) & 0x8080_8080_8080_8080;
    (others.trailing_zeros() / 8) as usize
}

/// The number that the first `count` digits of a word spell; not none of them.
#[inline]
fn spelled(ones: u64, count: usize) -> u64 {
    // Zeros before the digits change nothing, and what is behind them falls out at the top.
    eight_digits(ones.wrapping_shl(64 - 8 * count as u32))
}

/// The number that eight digits spell: they become pairs, fours and eights in the lanes of a word, without a branch
/// (D. Lemire, "Number parsing at a gigabyte per second", 2021, section 4).
#[inline]
fn eight_digits(ones: u64) -> u64 {
    let pairs = ones.wrapping_mul(10).wrapping_add(ones >> 8);
    let low = (pairs & 0x0000_00FF_0000_00FF).wrapping_mul(100 + (1_000_000 << 32));
    let high = ((pairs >> 16) & 0x0000_00FF_0000_00FF).wrapping_mul(1 + (10_000 << 32));
    low.wrapping_add(high) >> 32
}
