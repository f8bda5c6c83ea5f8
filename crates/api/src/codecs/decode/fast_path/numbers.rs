//! Reads JSON text from front to back, and writes arrays of numbers directly into columns.
//!
//! It is separate from the general parser because a body is mostly numbers, and the general parser makes several
//! function calls for each. Each function here either reads exactly what the general parser would read, or gives up.

use serde::Deserialize;

use crate::codecs::decode::fast_path::elements::{self, POWERS, Separator, is_clear};

/// The number of decimal digits that always fit in 64 bits.
const DIGITS_MAX: usize = 19;

/// The number of digits of a whole number that is certainly below 2^53.
const WHOLE_DIGITS_MAX: usize = 15;

/// How many elements an array grows by. It is small, so that little memory is wasted on short arrays.
const BLOCK: usize = 64;

/// Text that is read from front to back. After a function has returned nothing, the position is undefined.
pub(super) struct Text<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Text<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the next byte that is not white space, without consuming it.
    pub(super) fn peek(&mut self) -> Option<u8> {
        loop {
            let byte = *self.bytes.get(self.at)?;
            if !matches!(byte, b' ' | b'\n' | b'\r' | b'\t') {
                return Some(byte);
            }
            self.at += 1;
        }
    }

    /// Consumes and returns the next byte that is not white space.
    pub(super) fn next(&mut self) -> Option<u8> {
        let byte = self.peek()?;
        self.at += 1;
        Some(byte)
    }

    /// Consumes white space and then `byte`.
    pub(super) fn take(&mut self, byte: u8) -> Option<()> {
        (self.next()? == byte).then_some(())
    }

    /// Whether only white space is left.
    pub(super) fn is_at_end(&mut self) -> bool {
        self.peek().is_none()
    }

    /// Reads a string without escapes, such as the name of a field.
    pub(super) fn name(&mut self) -> Option<&'a [u8]> {
        self.take(b'"')?;
        let rest = &self.bytes[self.at..];
        let length = rest.iter().position(|&byte| byte == b'"')?;
        self.at += length + 1;
        Some(&rest[..length])
    }

    /// Reads a value of any other kind with the general parser.
    pub(super) fn value<T: Deserialize<'a>>(&mut self) -> Option<T> {
        let mut values = serde_json::Deserializer::from_slice(&self.bytes[self.at..]).into_iter::<T>();
        let value = values.next()?.ok()?;
        self.at += values.byte_offset();
        Some(value)
    }

    /// Reads an object. It calls `field` with the name of each field to read the field's value.
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

    /// Reads an array of at most `max` values, with an initial capacity of `expected`.
    pub(super) fn array<T>(
        &mut self,
        max: usize,
        expected: usize,
        element: impl FnMut(&mut Self) -> Option<T>,
    ) -> Option<Vec<T>> {
        self.array_with(max, expected, |_, _| {}, element)
    }

    /// Like [`array`](Self::array), but `run` may first read any number of values with the commas after them.
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

    /// Appends digits to `number` and returns how many there were. The number wraps around if it does not fit in 64
    /// bits.
    #[inline]
    fn digits(&mut self, number: &mut u64) -> usize {
        let start = self.at;
        while let Some(&eight) = self.bytes[self.at..].first_chunk() {
            let (count, value) = elements::leading_digits(eight);
            *number = elements::appended(*number, count, value);
            self.at += count;
            if count < eight.len() {
                return self.at - start;
            }
        }
        // Fewer than eight bytes of the body are left.
        while let Some(digit) = self.bytes.get(self.at).map(|byte| byte.wrapping_sub(b'0')).filter(|&digit| digit <= 9)
        {
            *number = number.wrapping_mul(10).wrapping_add(digit.into());
            self.at += 1;
        }
        self.at - start
    }

    /// Reads the digits before the decimal point. JSON does not allow leading zeros.
    #[inline]
    fn whole(&mut self, number: &mut u64) -> Option<usize> {
        let first = *self.bytes.get(self.at)?;
        let digits = self.digits(number);
        (digits == 1 || (digits > 1 && first != b'0')).then_some(digits)
    }

    /// Reads an array of token ids.
    pub(super) fn ids(&mut self, max: usize, expected: usize) -> Option<Vec<i32>> {
        self.array_with(max, expected, |text, array| text.elements(max, array, elements::id), Self::id)
    }

    /// Reads an array of floats.
    pub(super) fn floats(&mut self, max: usize, expected: usize) -> Option<Vec<f32>> {
        self.array_with(max, expected, |text, array| text.elements(max, array, elements::fraction), Self::float)
    }

    /// Reads an array of the bits of a mask.
    pub(super) fn bits(&mut self, max: usize, expected: usize) -> Option<Vec<u8>> {
        let run = |text: &mut Self, array: &mut Vec<u8>| {
            text.eight_bits::<3>(max, array);
            text.eight_bits::<2>(max, array);
        };
        self.array_with(max, expected, run, Self::bit)
    }

    /// Reads numbers until `read` does not accept one.
    fn elements<T: Copy + Default>(
        &mut self,
        max: usize,
        array: &mut Vec<T>,
        read: impl Fn(&[u8], Separator) -> Option<(T, usize)>,
    ) {
        let mut rest = &self.bytes[self.at..];
        let separator = Separator::first_in(rest);
        let mut goes_on = true;
        while goes_on {
            let start = array.len();
            // If the array has free capacity, it does not grow, because there may be no further numbers.
            let room = Some(array.capacity() - start).filter(|&room| room > 0).map_or(BLOCK, |room| room.min(BLOCK));
            array.resize(max.min(start + room), T::default());
            let mut filled = start;
            for place in &mut array[start..] {
                let Some((number, length)) = read(rest, separator) else { break };
                *place = number;
                rest = &rest[length..];
                filled += 1;
            }
            goes_on = filled == array.len() && filled > start;
            array.truncate(filled);
        }
        self.at = self.bytes.len() - rest.len();
    }

    /// Reads bits, eight at a time, while all eight have the same separator.
    fn eight_bits<const STRIDE: usize>(&mut self, max: usize, array: &mut Vec<u8>) {
        let mut rest = &self.bytes[self.at..];
        while array.len() + 8 <= max
            && let Some((eight, after)) = rest.split_at_checked(8 * STRIDE)
            && let Some(bits) = elements::bits::<STRIDE>(eight)
        {
            array.extend_from_slice(&bits);
            rest = after;
        }
        self.at = self.bytes.len() - rest.len();
    }

    /// Reads a token id, which is not negative.
    fn id(&mut self) -> Option<i32> {
        let mut number = 0;
        let digits = self.whole(&mut number)?;
        (digits <= DIGITS_MAX).then(|| i32::try_from(number).ok()).flatten()
    }

    /// Reads a bit of a mask.
    fn bit(&mut self) -> Option<u8> {
        let bit = self.bytes.get(self.at)?.wrapping_sub(b'0');
        self.at += 1;
        (bit <= 1).then_some(bit)
    }

    /// Reads a decimal and rounds it to the nearest 64-bit float, as Python does, and then to the nearest 32-bit float.
    /// It gives up if the result is not finite.
    pub(super) fn float(&mut self) -> Option<f32> {
        let start = self.at;
        let is_negative = self.bytes.get(self.at) == Some(&b'-');
        self.at += usize::from(is_negative);
        let mut number = 0;
        let mut digits = match self.bytes.get(self.at..self.at + 2) {
            // Most numbers have one digit before the point.
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
            let fraction = self.digits(&mut number);
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
        let fast = if digits <= DIGITS_MAX { scaled(number, power) } else { None };
        let magnitude = match fast {
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
        // A number with a longer exponent is zero or infinite.
        if !(1..=4).contains(&digits) {
            return None;
        }
        Some(if sign == Some(b'-') { -(exponent as i64) } else { exponent as i64 })
    }
}

/// Computes `number * 10^power` as a 32-bit float. It gives up if intermediate rounding may have changed the result.
fn scaled(number: u64, power: i64) -> Option<f32> {
    if number == 0 {
        return Some(0.0);
    }
    let scale = *POWERS.get(power.unsigned_abs() as usize)?;
    let magnitude = if power < 0 { number as f64 / scale } else { number as f64 * scale };
    let is_normal = magnitude >= f64::from(f32::MIN_POSITIVE) && magnitude < f64::from(f32::MAX);
    (is_normal && is_clear(magnitude)).then_some(magnitude as f32)
}

/// Parses the number with the standard library, which is slower and always correct.
fn exact(text: &[u8]) -> Option<f32> {
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    Some(number as f32).filter(|number| number.is_finite())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::codecs::decode::fast_path::elements::{LOST_BITS, MIDDLE};

    /// Parses a float at the end of a body, in the middle of one, and in arrays.
    fn float(text: &str) -> Option<f32> {
        let [at_end, before_more] = [text.to_owned(), format!("{text}{:32}", "")].map(|text| {
            let mut read = Text::new(text.as_bytes());
            let number = read.float()?;
            read.is_at_end().then_some(number)
        });
        assert_eq!(at_end.map(f32::to_bits), before_more.map(f32::to_bits), "{text}");
        for separator in [",", ", ", " , "] {
            let array = format!("[{}]{:40}", [text; 3].join(separator), "");
            let read = Text::new(array.as_bytes()).floats(3, 2);
            let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
            assert_eq!(read.map(bits), at_end.map(|number| vec![number.to_bits(); 3]), "{array}");
        }
        at_end
    }

    /// Formats a small number as Python prints it.
    fn python(number: f64) -> String {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once("e-").expect("the number is small");
        format!("{digits}e-{exponent:0>2}")
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
            "-1.1920928955078125e-45",
            "1.1754943508222875e-38",
            "1.1754942807573643e-38",
            "1.5e-70",
            "1.5e+10",
            "1.5e-7",
            "9.223372036854775807",
            "9.2233720368547758071",
            "0.00000000000000000000012",
            "1e-05",
            "5E+3",
            // Midpoints between two 32-bit floats, and numbers next to them.
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
        for text in [
            "",
            "-",
            "--1.5",
            "+1",
            ".5",
            "1.",
            "01",
            "-01",
            "01.5",
            "1e",
            "1e+",
            "1.5e-",
            "1.5e-0x",
            "1.5e--7",
            "NaN",
            "Infinity",
            "-Infinity",
            "1e999",
            "0x1",
            "1.5,",
            "1.x",
            "1.12345678x",
            "1.1234567812345678x",
        ] {
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
            // The number as Python writes it, with fewer digits, and as the nearest midpoint of two 32-bit floats.
            let middle = f64::from_bits(bits & !LOST_BITS | MIDDLE);
            for text in [format!("{number:e}"), format!("{number:.digits$e}"), format!("{middle:e}")] {
                let expected = Some(nearest(&text)).filter(|number| number.is_finite());
                prop_assert_eq!(float(&text).map(f32::to_bits), expected.map(f32::to_bits), "{}", text);
            }
        }

        #[test]
        fn probabilities_are_read_as_the_standard_library_does(number in -20.0_f64..0.0, tiny in 0_u32..1 << 20) {
            let middle = f64::from_bits(number.to_bits() & !LOST_BITS | MIDDLE);
            let tiny_middle = (2.0 * f64::from(tiny) + 1.0) * 2.0_f64.powi(-150);
            let texts = [
                format!("{number}"),
                format!("{number:.4}"),
                format!("{}", f64::from(number as f32)),
                format!("{middle}"),
                format!("{:.17}", middle / 16.0),
                python(f64::from(number as f32) * 1e-7),
                python(tiny_middle),
            ];
            for text in texts {
                prop_assert_eq!(float(&text).map(f32::to_bits), Some(nearest(&text).to_bits()), "{}", text);
            }
        }
    }
}
