//! Thrift's compact protocol, as far as it takes to walk over a value that nobody vouches for.
//!
//! Every reader returns `None` for bytes that are not a value: none panics, none allocates, and none goes deeper than
//! [`MAX_DEPTH`]. No list has more elements than bytes are left for.

/// Deepest nesting of values.
pub const MAX_DEPTH: usize = 64;

/// A type, as fields and lists name it.
pub type Kind = u8;

/// Ends the fields of a struct.
const STOP: Kind = 0;
/// As a field's type, also its value.
const TRUE: Kind = 1;
const FALSE: Kind = 2;
const BYTE: Kind = 3;
const I16: Kind = 4;
pub const I32: Kind = 5;
pub const I64: Kind = 6;
const DOUBLE: Kind = 7;
const BINARY: Kind = 8;
pub const LIST: Kind = 9;
const SET: Kind = 10;
const MAP: Kind = 11;
pub const STRUCT: Kind = 12;
const UUID: Kind = 13;

/// What is left to be read.
pub struct Walker<'a> {
    rest: &'a [u8],
}

impl<'a> Walker<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    /// How many bytes are left to be read.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// Hands each field of a struct to `field`, by its id and type; `field` reads or skips its value.
    pub fn fields(&mut self, mut field: impl FnMut(&mut Self, i16, Kind) -> Option<()>) -> Option<()> {
        let mut id = 0_i16;
        loop {
            let header = self.byte()?;
            let kind = header & 0x0f;
            if kind == STOP {
                return Some(());
            }
            id = match header >> 4 {
                0 => i16::try_from(self.int()?).ok()?,
                delta => id.checked_add(i16::from(delta))?,
            };
            field(self, id, kind)?;
        }
    }

    /// The type and the number of a list's elements, which come next.
    pub fn list(&mut self) -> Option<(Kind, usize)> {
        let header = self.byte()?;
        let elements = match header >> 4 {
            15 => usize::try_from(self.varint()?).ok()?,
            short => usize::from(short),
        };
        (elements <= self.rest.len()).then_some((header & 0x0f, elements))
    }

    /// Like [`Walker::list`], of structs. An empty list need not say of what.
    pub fn structs(&mut self) -> Option<usize> {
        let (kind, elements) = self.list()?;
        (kind == STRUCT || elements == 0).then_some(elements)
    }

    /// An integer of any width.
    pub fn int(&mut self) -> Option<i64> {
        let zigzag = self.varint()?;
        Some((zigzag >> 1).cast_signed() ^ -(zigzag & 1).cast_signed())
    }

    /// Leaves out a value.
    pub fn skip(&mut self, kind: Kind) -> Option<()> {
        self.skip_within(kind, MAX_DEPTH)
    }

    fn skip_within(&mut self, kind: Kind, depth: usize) -> Option<()> {
        let depth = depth.checked_sub(1)?;
        match kind {
            TRUE | FALSE => Some(()),
            BYTE => self.take(1),
            I16 | I32 | I64 => self.varint().map(drop),
            DOUBLE => self.take(8),
            BINARY => {
                let bytes = self.varint()?;
                self.take(usize::try_from(bytes).ok()?)
            }
            LIST | SET => {
                let (kind, elements) = self.list()?;
                (0..elements).try_for_each(|_| self.skip_element(kind, depth))
            }
            MAP => {
                let entries = self.varint()?;
                if entries == 0 {
                    return Some(());
                }
                let kinds = self.byte()?;
                (0..entries).try_for_each(|_| {
                    self.skip_element(kinds >> 4, depth)?;
                    self.skip_element(kinds & 0x0f, depth)
                })
            }
            STRUCT => self.fields(|walker, _, kind| walker.skip_within(kind, depth)),
            UUID => self.take(16),
            _ => None,
        }
    }

    /// An element is never without bytes: a bool's value is not in its type.
    fn skip_element(&mut self, kind: Kind, depth: usize) -> Option<()> {
        match kind {
            TRUE | FALSE => self.take(1),
            _ => self.skip_within(kind, depth),
        }
    }

    fn byte(&mut self) -> Option<u8> {
        let (&first, rest) = self.rest.split_first()?;
        self.rest = rest;
        Some(first)
    }

    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..u64::BITS).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, bytes: usize) -> Option<()> {
        self.rest = self.rest.get(bytes..)?;
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_walked_over() {
        let mut fields = Vec::new();
        let bytes = [
            0x15, 0x03, // 1: i32, -2
            0x1c, 0x11, 0x00, // 2: a struct with one field, true
            0x19, 0x21, 0x01, 0x02, // 3: a list of two bools
            0x1b, 0x01, 0x85, 0x01, b'k', 0x04, // 4: a map of binary to i32
            0x08, 0xc8, 0x01, 0x01, b'x', // 100: binary
            0x00,
        ];
        let mut walker = Walker::new(&bytes);
        let walked = walker.fields(|walker, id, kind| {
            fields.push((id, kind));
            match kind {
                I32 => (walker.int()? == -2).then_some(()),
                kind => walker.skip(kind),
            }
        });
        assert_eq!(walked, Some(()));
        assert_eq!(fields, [(1, I32), (2, STRUCT), (3, LIST), (4, MAP), (100, BINARY)]);
        assert!(walker.rest.is_empty());
        for end in 0..bytes.len() {
            assert_eq!(Walker::new(&bytes[..end]).skip(STRUCT), None, "cut at {end}");
        }
    }

    #[test]
    fn what_is_no_value_ends_the_walk() {
        for (what, bytes) in [
            ("a list longer than what is left", &[0x19, 0xfc, 0xff, 0xff, 0xff, 0xff, 0x07, 0x00][..]),
            ("a number without an end", &[0x15, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
            ("an unknown type", &[0x1e, 0x00]),
            ("an id beyond all ids", &[0x05, 0xfe, 0xff, 0x03, 0x00, 0x15, 0x00, 0x00]),
            ("text longer than what is left", &[0x18, 0x7f, b'x', 0x00]),
            ("structs without an end", &[0x1c; 100]),
        ] {
            assert_eq!(Walker::new(bytes).skip(STRUCT), None, "{what}");
        }
    }
}
