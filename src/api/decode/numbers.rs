//! JSON text read from front to back, and arrays of numbers straight into columns.
//!
//! Apart from the general parser because a body is mostly numbers, and that parser goes through several calls for each.
//! Everything here either reads exactly what the general parser would, or gives up.

use serde::Deserialize;

/// Powers of ten that a decimal is scaled by; the exact way reads what needs larger ones.
const POWERS: [f64; 65] = [
    1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20,
    1e21, 1e22, 1e23, 1e24, 1e25, 1e26, 1e27, 1e28, 1e29, 1e30, 1e31, 1e32, 1e33, 1e34, 1e35, 1e36, 1e37, 1e38, 1e39,
    1e40, 1e41, 1e42, 1e43, 1e44, 1e45, 1e46, 1e47, 1e48, 1e49, 1e50, 1e51, 1e52, 1e53, 1e54, 1e55, 1e56, 1e57, 1e58,
    1e59, 1e60, 1e61, 1e62, 1e63, 1e64,
];

/// What a number is multiplied by when so many digits are appended.
const SHIFTS: [u64; 9] = [1, 10, 100, 1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

/// Decimal digits that always fit 64 bits.
const DIGITS_MAX: usize = 19;

/// Digits of a whole number below 2^53.
const WHOLE_DIGITS_MAX: usize = 15;

/// Bits of a 64-bit float's significand that a 32-bit float has no place for.
const LOST_BITS: u64 = (1 << 29) - 1;

/// The middle between two 32-bit floats, in those bits.
const MIDDLE: u64 = 1 << 28;

/// How far from the true value a scaled decimal may be, in units of the last place: three roundings of half a unit.
const ERROR_UNITS: u64 = 4;

/// Text that is read from front to back. Whatever gives nothing leaves the place undefined.
pub(super) struct Text<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Text<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The next byte that is no blank, which stays.
    pub(super) fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.bytes.get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    /// The next byte that is no blank.
    pub(super) fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    /// Takes `byte`, after blanks.
    pub(super) fn take(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    /// Whether only blanks are left.
    pub(super) fn is_at_end(&mut self) -> bool {
        self.peek().is_none()
    }

    /// A text without escapes: the names of fields.
    pub(super) fn name(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|&byte| byte == b'"')?;
        self.at += length + 1;
        Some(&rest[..length])
    }

    /// A value of any other kind, as the general parser reads it.
    pub(super) fn value<T: Deserialize<'a>>(&mut self) -> Option<T> {
        let mut values = serde_json::Deserializer::from_slice(&self.bytes[self.at..]).into_iter::<T>();
        let value = values.next()?.ok()?;
        self.at += values.byte_offset();
        Some(value)
    }

    /// Calls `field` with the name of each field of an object, to read its value.
    pub(super) fn object(&mut self, mut field: impl FnMut(&mut Self, &'a [u8]) -> Option<()>) -> Option<()> {
        self.take(b'{')?;
        if self.peek()? == b'}' {
            return self.take(b'}');
        }
        loop {
            let name = self.name()?;
            self.take(b':')?;
            field(self, name)?;
            match self.next()? {
                b',' => {}
                b'}' => return Some(()),
                _ => return None,
            }
        }
    }

    /// An array of at most `max` values; `expected` are made room for.
    pub(super) fn array<T>(
        &mut self,
        max: usize,
        expected: usize,
        element: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.array_with(max, expected, |_, _| {}, element)
    }

    /// The same, where `run` may take any number of values with the commas behind them.
    fn array_with<T>(
        &mut self,
        max: usize,
        expected: usize,
        mut run: impl FnMut(&mut Self, &mut Vec<T>),
        mut element: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.take(b'[')?;
        let mut array = Vec::with_capacity(expected.min(max));
        if self.peek()? == b']' {
            return self.take(b']').map(|()| array);
        }
        loop {
            run(self, &mut array);
            self.peek()?;
            if array.len() >= max {
                return None;
            }
            array.push(element(self)?);
            match self.next()? {
                b',' => {}
                b']' => return Some(array),
                _ => return None,
            }
        }
    }

    /// Digits, appended to those of `number`; how many. More than fit 64 bits wrap around.
    #[inline]
    fn digits(&mut self, number: &mut u64) -> usize {
        let start = self.at;
        while let Some(&eight) = self.bytes[self.at..].first_chunk() {
            let (count, value) = leading_digits(eight);
            *number = number.wrapping_mul(SHIFTS[count]).wrapping_add(value);
            self.at += count;
            if count < eight.len() {
                return self.at - start;
            }
        }
        // The last bytes of a body.
        while let Some(digit) = self.bytes.get(self.at).map(|byte| byte.wrapping_sub(b'0')).filter(|&digit| digit <= 9)
        {
            *number = number.wrapping_mul(10).wrapping_add(digit.into());
            self.at += 1;
        }
        self.at - start
    }

    /// The same for many digits, as fractions have: three words at once, since none has to wait for where another ends.
    #[inline]
    fn many_digits(&mut self, number: &mut u64) -> usize {
        let Some(&text) = self.bytes[self.at..].first_chunk::<24>() else { return self.digits(number) };
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&text[at..at + 8]);
            leading_digits(word)
        };
        let (first, second, third) = (word(0), word(8), word(16));
        let none = (0, 0);
        let second = if first.0 == 8 { second } else { none };
        let third = if second.0 == 8 { third } else { none };
        for (count, value) in [first, second, third] {
            *number = number.wrapping_mul(SHIFTS[count]).wrapping_add(value);
        }
        let count = first.0 + second.0 + third.0;
        self.at += count;
        if count < text.len() { count } else { count + self.digits(number) }
    }

    /// The digits before a point: JSON has no leading zeros.
    #[inline]
    fn whole(&mut self, number: &mut u64) -> Option<usize> {
        let first = *self.bytes.get(self.at)?;
        let digits = self.digits(number);
        (digits == 1 || (digits > 1 && first != b'0')).then_some(digits)
    }

    /// An array of token ids.
    pub(super) fn ids(&mut self, max: usize, expected: usize) -> Option<Vec<i32>> {
        self.array_with(max, expected, |text, array| text.short_ids(max, array), Self::id)
    }

    /// Ids of few digits with nothing unusual around them, each seen in one look.
    fn short_ids(&mut self, max: usize, array: &mut Vec<i32>) {
        while array.len() < max
            && let Some(&eight) = self.bytes[self.at..].first_chunk::<8>()
        {
            let (count, value) = leading_digits(eight);
            let has_leading_zero = count > 1 && eight[0] == b'0';
            if count == 0 || eight.get(count) != Some(&b',') || has_leading_zero {
                return;
            }
            array.push(value as i32);
            self.at += count + 1;
            self.at += usize::from(self.bytes.get(self.at) == Some(&b' '));
        }
    }

    /// An array of the bits of a mask.
    pub(super) fn bits(&mut self, max: usize, expected: usize) -> Option<Vec<u8>> {
        let run = |text: &mut Self, array: &mut Vec<u8>| {
            text.eight_bits::<24>(max, array);
            text.eight_bits::<16>(max, array);
        };
        self.array_with(max, expected, run, Self::bit)
    }

    /// Bits eight at a time, as long as they are written with the same separator in so many bytes.
    fn eight_bits<const BYTES: usize>(&mut self, max: usize, array: &mut Vec<u8>) {
        let stride = BYTES / 8;
        while array.len() + 8 <= max
            && let Some(eight) = self.bytes[self.at..].first_chunk::<BYTES>()
        {
            // What is left of each byte where it is what it should be: the bit of a digit, nothing of a separator.
            let left: [u8; BYTES] = std::array::from_fn(|at| eight[at] ^ b"0, "[at % stride]);
            let is_usual =
                left.iter().enumerate().fold(0, |odd, (at, byte)| odd | (byte >> u8::from(at % stride == 0)));
            if is_usual != 0 {
                return;
            }
            array.extend_from_slice(&std::array::from_fn::<u8, 8, _>(|at| left[at * stride]));
            self.at += BYTES;
        }
    }

    /// A token id: 0 or above.
    fn id(&mut self) -> Option<i32> {
        let mut number = 0;
        let digits = self.whole(&mut number)?;
        (digits <= DIGITS_MAX).then(|| i32::try_from(number).ok()).flatten()
    }

    /// A bit of a mask.
    fn bit(&mut self) -> Option<u8> {
        let bit = self.bytes.get(self.at)?.wrapping_sub(b'0');
        self.at += 1;
        (bit <= 1).then_some(bit)
    }

    /// A decimal as the nearest 64-bit float, as Python reads it, and that as the nearest 32-bit float, if finite.
    pub(super) fn float(&mut self) -> Option<f32> {
        let start = self.at;
        let is_negative = self.bytes.get(self.at) == Some(&b'-');
        self.at += usize::from(is_negative);
        let mut number = 0;
        let mut digits = match self.bytes.get(self.at..self.at + 2) {
            // Of most numbers only one stands there.
            Some(&[digit @ b'0'..=b'9', b'.']) => {
                number = u64::from(digit - b'0');
                self.at += 1;
                1
            }
            _ => self.whole(&mut number)?,
        };
        let mut power = 0;
        let mut is_whole = true;
        if self.bytes.get(self.at) == Some(&b'.') {
            self.at += 1;
            let fraction = self.many_digits(&mut number);
            if fraction == 0 {
                return None;
            }
            digits += fraction;
            power -= fraction as i64;
            is_whole = false;
        }
        if matches!(self.bytes.get(self.at), Some(b'e' | b'E')) {
            self.at += 1;
            power += self.exponent()?;
            is_whole = false;
        }
        if is_whole && digits > WHOLE_DIGITS_MAX {
            return None;
        }
        let text = &self.bytes[start + usize::from(is_negative)..self.at];
        if digits > DIGITS_MAX {
            digits -=
                text.iter().take_while(|&&byte| matches!(byte, b'0' | b'.')).filter(|&&byte| byte == b'0').count();
        }
        let quick = if digits <= DIGITS_MAX { scaled(number, power) } else { None };
        let magnitude = match quick {
            Some(magnitude) => magnitude,
            None => exact(text)?,
        };
        Some(if is_negative { -magnitude } else { magnitude })
    }

    fn exponent(&mut self) -> Option<i64> {
        let sign = self.bytes.get(self.at).copied();
        self.at += usize::from(matches!(sign, Some(b'+' | b'-')));
        let mut exponent = 0;
        let digits = self.digits(&mut exponent);
        // Longer ones are zero or infinite.
        if !(1..=4).contains(&digits) {
            return None;
        }
        Some(if sign == Some(b'-') { -(exponent as i64) } else { exponent as i64 })
    }
}

/// How many of eight bytes are digits from the first on, and the number that those spell.
///
/// A step at a time for all bytes of one word, without a branch on how many there are: digits become pairs, fours and
/// eights in its lanes (D. Lemire, "Number parsing at a gigabyte per second", 2021, section 4).
#[inline]
fn leading_digits(text: [u8; 8]) -> (usize, u64) {
    let ones = u64::from_le_bytes(text) ^ 0x3030_3030_3030_3030;
    // The highest bit of each byte that is no digit; a carry only reaches bytes after one.
    let others = (ones | ones.wrapping_add(0x7676_7676_7676_7676)) & 0x8080_8080_8080_8080;
    let count = others.trailing_zeros() / 8;
    // Zeros before the digits change nothing, and what is behind them falls out at the top.
    let ones = ones.checked_shl(64 - 8 * count).unwrap_or(0);
    let pairs = ones.wrapping_mul(10).wrapping_add(ones >> 8);
    let low = (pairs & 0x0000_00FF_0000_00FF).wrapping_mul(100 + (1_000_000 << 32));
    let high = ((pairs >> 16) & 0x0000_00FF_0000_00FF).wrapping_mul(1 + (10_000 << 32));
    (count as usize, low.wrapping_add(high) >> 32)
}

/// `number * 10^power` as a 32-bit float, where rounding on the way cannot have changed it.
fn scaled(number: u64, power: i64) -> Option<f32> {
    if number == 0 {
        return Some(0.0);
    }
    let scale = *POWERS.get(power.unsigned_abs() as usize)?;
    let magnitude = if power < 0 { number as f64 / scale } else { number as f64 * scale };
    let is_normal = magnitude >= f64::from(f32::MIN_POSITIVE) && magnitude < f64::from(f32::MAX);
    let is_clear = (magnitude.to_bits() & LOST_BITS).abs_diff(MIDDLE) > ERROR_UNITS;
    (is_normal && is_clear).then_some(magnitude as f32)
}

/// The same in the standard library's way, which is always right.
fn exact(text: &[u8]) -> Option<f32> {
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    Some(number as f32).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// At the end of a body and in the middle of one.
    fn float(text: &str) -> Option<f32> {
        let [at_end, before_more] = [text.to_owned(), format!("{text}{:32}", "")].map(|text| {
            let mut read = Text::new(text.as_bytes());
            let number = read.float()?;
            read.is_at_end().then_some(number)
        });
        assert_eq!(at_end.map(f32::to_bits), before_more.map(f32::to_bits), "{text}");
        at_end
    }

    fn nearest(text: &str) -> f32 {
        text.parse::<f64>().expect("the text is a number") as f32
    }

    #[test]
    fn floats_are_the_nearest_ones() {
        for text in [
            "0",
            "-0",
            "0.0",
            "-0.0",
            "1",
            "-1",
            "0.1",
            "-0.7",
            "1.0",
            "-1.1920928955078125e-07",
            "1e-05",
            "5E+3",
            // Middles between two 32-bit floats, and beside them.
            "1.00000005960464477539062",
            "1.0000000596046448",
            "1.00000005960464477539063",
            "16777217.0",
            "16777219.0",
            "3.4028234663852886e38",
            "1.4012984643248171e-45",
            "7.006492321624085e-46",
            "1e-60",
            "0.30000000000000004",
            "123456789012345678901234567890.5",
            "0.000000000000000000000001",
            "0.1234567890123456789012345678901234567890",
            "-7.00000000",
            "-0.12345678",
            "0.1234567890123456",
            "0.123456789012345678901234",
        ] {
            assert_eq!(float(text).map(f32::to_bits), Some(nearest(text).to_bits()), "{text}");
        }
    }

    #[test]
    fn what_is_no_json_number_is_left_to_the_parser() {
        for text in
            ["", "-", "+1", ".5", "1.", "01", "-01", "1e", "1e+", "NaN", "Infinity", "-Infinity", "1e999", "0x1"]
        {
            assert_eq!(float(text), None, "{text}");
        }
    }

    #[test]
    fn ids_and_bits_are_what_columns_hold() {
        let ids = |text: &str| Text::new(text.as_bytes()).ids(4, 0);
        assert_eq!(ids("[0, 7,128000 ,\n2147483647]"), Some(vec![0, 7, 128_000, i32::MAX]));
        for text in
            ["[2147483648]", "[-1]", "[1.0]", "[1,2,3,4,5]", "[01]", "[1,]", "[,1]", "[1", "[18446744073709551617]"]
        {
            assert_eq!(ids(text), None, "{text}");
        }
        let bits = |text: &str| Text::new(text.as_bytes()).bits(4, 0);
        assert_eq!(bits("[0,1, 1]"), Some(vec![0, 1, 1]));
        for text in ["[2]", "[10]", "[true]", "[1.0]"] {
            assert_eq!(bits(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arrays_are_read_as_the_general_parser_does(
            ids in proptest::collection::vec(prop_oneof![0..10, 0..200_000, 0..i32::MAX], 0..40),
            bits in proptest::collection::vec(0_u8..2, 0..40),
            separator in prop_oneof![Just(","), Just(", "), Just(" , "), Just(",\n")],
            max in 0_usize..40,
        ) {
            let written = |numbers: Vec<String>| format!("[{}]{}", numbers.join(separator), " ".repeat(24));
            let text = written(ids.iter().map(i32::to_string).collect());
            let expected = (ids.len() <= max).then_some(ids);
            prop_assert_eq!(Text::new(text.as_bytes()).ids(max, 0), expected);
            let text = written(bits.iter().map(u8::to_string).collect());
            let expected = (bits.len() <= max).then_some(bits);
            prop_assert_eq!(Text::new(text.as_bytes()).bits(max, 0), expected);
        }

        #[test]
        fn what_is_damaged_is_refused_or_read_alike(at in 0_usize..60, byte: u8, separator in prop_oneof![Just(","), Just(", ")]) {
            for numbers in [vec!["1"; 20], vec!["120", "0", "54321", "7654321", "87654321"]] {
                let mut text = format!("[{}]", numbers.join(separator)).into_bytes();
                let length = text.len();
                text[at % length] = byte;
                let general: Option<Vec<i32>> = serde_json::from_slice(&text).ok().filter(|ids: &Vec<i32>| ids.iter().all(|&id| id >= 0));
                let mut read = Text::new(&text);
                let ids = read.ids(100, 0).filter(|_| read.is_at_end());
                prop_assert_eq!(&ids, &general);
                let general = general.filter(|bits| bits.iter().all(|&bit| bit <= 1));
                let mut read = Text::new(&text);
                let bits = read.bits(100, 0).filter(|_| read.is_at_end());
                prop_assert_eq!(bits.map(|bits| bits.into_iter().map(i32::from).collect::<Vec<_>>()), general);
            }
        }

        #[test]
        fn any_float_is_read_as_the_standard_library_does(bits: u64, digits in 0_usize..20) {
            let number = f64::from_bits(bits);
            prop_assume!(number.is_finite());
            // As Python writes it, with fewer digits, and as the nearest middle of two 32-bit floats.
            let middle = f64::from_bits(bits & !LOST_BITS | MIDDLE);
            for text in [format!("{number:e}"), format!("{number:.digits$e}"), format!("{middle:e}")] {
                let expected = Some(nearest(&text)).filter(|number| number.is_finite());
                prop_assert_eq!(float(&text).map(f32::to_bits), expected.map(f32::to_bits), "{}", text);
            }
        }

        #[test]
        fn probabilities_are_read_as_the_standard_library_does(number in -20.0_f64..0.0) {
            for text in [format!("{number}"), format!("{number:.4}"), format!("{}", f64::from(number as f32))] {
                prop_assert_eq!(float(&text).map(f32::to_bits), Some(nearest(&text).to_bits()), "{}", text);
            }
        }
    }
}
