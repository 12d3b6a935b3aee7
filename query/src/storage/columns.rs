//! Columns of values in little memory, each read by its place: numbers in as few bytes as their range needs, texts without what all of
//! them begin and end with. A column of one value takes next to nothing. They do not change once they are made.

use std::borrow::Cow;

use iceberg::spec::PrimitiveLiteral;

use crate::error::{Error, Result};

/// Which of a column's values are there; `None`: all.
#[derive(Debug)]
struct Present(Option<Box<[u64]>>);

impl Present {
    fn new(are_there: impl ExactSizeIterator<Item = bool>) -> Self {
        let mut words = vec![0_u64; are_there.len().div_ceil(64)];
        let mut all = true;
        for (at, is_there) in are_there.enumerate() {
            all &= is_there;
            words[at / 64] |= u64::from(is_there) << (at % 64);
        }
        Self((!all).then(|| words.into()))
    }

    fn has(&self, at: usize) -> bool {
        self.0.as_ref().is_none_or(|words| (words[at / 64] >> (at % 64)) & 1 == 1)
    }

    fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |words| size_of_val::<[u64]>(words))
    }
}

/// Whole numbers, each as what it is above the least of them.
#[derive(Debug)]
pub struct Numbers {
    present: Present,
    least: i64,
    /// Of one number, in bytes: 0, 1, 2, 4 or 8.
    width: usize,
    above: Box<[u8]>,
}

impl Numbers {
    pub fn new(values: &[Option<i64>]) -> Self {
        let there = || values.iter().flatten().copied();
        let (least, most) = (there().min().unwrap_or(0), there().max().unwrap_or(0));
        let width = match most.wrapping_sub(least).cast_unsigned() {
            0 => 0,
            1..=0xff => 1,
            0x100..=0xffff => 2,
            0x1_0000..=0xffff_ffff => 4,
            _ => 8,
        };
        let mut above = Vec::with_capacity(values.len() * width);
        for value in values {
            let more = value.map_or(0, |value| value.wrapping_sub(least).cast_unsigned());
            above.extend_from_slice(&more.to_le_bytes()[..width]);
        }
        Self { present: Present::new(values.iter().map(Option::is_some)), least, width, above: above.into() }
    }

    pub fn get(&self, at: usize) -> Option<i64> {
        if !self.present.has(at) {
            return None;
        }
        let mut bytes = [0; 8];
        bytes[..self.width].copy_from_slice(&self.above[at * self.width..][..self.width]);
        Some(self.least.wrapping_add(u64::from_le_bytes(bytes).cast_signed()))
    }

    /// What it takes on the heap.
    pub fn bytes(&self) -> usize {
        self.present.bytes() + self.above.len()
    }
}

/// Texts, or bytes, of any length.
#[derive(Debug)]
pub struct Texts {
    present: Present,
    /// What all begin with, and end with.
    prefix: Box<[u8]>,
    suffix: Box<[u8]>,
    /// The rest of each, one behind the other, and where each of them ends.
    rest: Box<[u8]>,
    ends: Ends,
}

#[derive(Debug)]
enum Ends {
    /// All are of this length.
    Every(usize),
    At(Box<[u32]>),
}

impl Texts {
    /// # Errors
    /// `Exhausted` if there are more than 4 GiB.
    pub fn new(values: &[Option<Cow<'_, [u8]>>]) -> Result<Self> {
        let there = || values.iter().flatten().map(AsRef::<[u8]>::as_ref);
        let first = there().next().unwrap_or_default();
        let shortest = there().map(<[u8]>::len).min().unwrap_or(0);
        let prefix = there().fold(shortest, |so_far, text| same(first[..so_far].iter(), text.iter()));
        let suffix =
            there().fold(shortest - prefix, |so_far, text| same(first.iter().rev().take(so_far), text.iter().rev()));
        let part = |text: &'_ [u8]| prefix..text.len() - suffix;
        let length = there().map(|text| part(text).len()).sum::<usize>();
        let total = u32::try_from(length).map_err(|_| Error::exhausted("a manifest with more than 4 GiB of texts"))?;
        let every = first.len() - prefix - suffix;
        let are_alike = there().count() == values.len() && there().all(|text| part(text).len() == every);
        let mut rest = Vec::with_capacity(length);
        let mut ends = Vec::with_capacity(if are_alike { 0 } else { values.len() });
        for value in values {
            if let Some(text) = value {
                rest.extend_from_slice(&text[part(text)]);
            }
            if !are_alike {
                ends.push(u32::try_from(rest.len()).unwrap_or(total));
            }
        }
        Ok(Self {
            present: Present::new(values.iter().map(Option::is_some)),
            prefix: first[..prefix].into(),
            suffix: first[first.len() - suffix..].into(),
            rest: rest.into(),
            ends: if are_alike { Ends::Every(every) } else { Ends::At(ends.into()) },
        })
    }

    pub fn get(&self, at: usize) -> Option<Cow<'_, [u8]>> {
        if !self.present.has(at) {
            return None;
        }
        let rest = match &self.ends {
            Ends::Every(length) => &self.rest[at * length..][..*length],
            Ends::At(ends) => {
                let begin = at.checked_sub(1).map_or(0, |before| ends[before] as usize);
                &self.rest[begin..ends[at] as usize]
            }
        };
        Some(match self.prefix.is_empty() && self.suffix.is_empty() {
            true => Cow::Borrowed(rest),
            false => Cow::Owned([&*self.prefix, rest, &*self.suffix].concat()),
        })
    }

    /// What it takes on the heap.
    pub fn bytes(&self) -> usize {
        let ends = match &self.ends {
            Ends::Every(_) => 0,
            Ends::At(ends) => size_of_val::<[u32]>(ends),
        };
        self.present.bytes() + self.prefix.len() + self.suffix.len() + self.rest.len() + ends
    }
}

/// How many bytes the two begin with that are the same.
fn same<'a>(one: impl Iterator<Item = &'a u8>, other: impl Iterator<Item = &'a u8>) -> usize {
    one.zip(other).take_while(|(one, other)| one == other).count()
}

/// Iceberg's values of one kind.
#[derive(Debug)]
pub enum Values {
    Numbers(Kind, Numbers),
    Texts(Kind, Texts),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Boolean,
    Int,
    Long,
    Float,
    Double,
    String,
    Binary,
    Int128,
    UInt128,
}

impl Values {
    /// # Errors
    /// `Corrupt` if they are of several kinds, or of one that files have no values of.
    pub fn new(values: &[Option<&PrimitiveLiteral>]) -> Result<Self> {
        let mut kinds = values.iter().flatten().map(|value| kind(value));
        let kind = match kinds.next() {
            None => Kind::Int,
            Some(first) => first.filter(|_| kinds.all(|kind| kind == first)).ok_or_else(odd)?,
        };
        match kind {
            Kind::Boolean | Kind::Int | Kind::Long | Kind::Float | Kind::Double => {
                let numbers: Vec<_> = values.iter().map(|value| value.and_then(number)).collect();
                Ok(Self::Numbers(kind, Numbers::new(&numbers)))
            }
            Kind::String | Kind::Binary | Kind::Int128 | Kind::UInt128 => {
                let texts: Vec<_> = values.iter().map(|value| value.map(bytes)).collect();
                Ok(Self::Texts(kind, Texts::new(&texts)?))
            }
        }
    }

    /// # Errors
    /// `Internal` if what was kept is none.
    pub fn get(&self, at: usize) -> Result<Option<PrimitiveLiteral>> {
        use PrimitiveLiteral as Literal;
        Ok(Some(match self {
            Values::Numbers(kind, numbers) => {
                let Some(value) = numbers.get(at) else { return Ok(None) };
                match kind {
                    Kind::Boolean => Literal::Boolean(value != 0),
                    Kind::Float => Literal::Float(f32::from_bits(value as u32).into()),
                    Kind::Double => Literal::Double(f64::from_bits(value.cast_unsigned()).into()),
                    Kind::Int => Literal::Int(value as i32),
                    _ => Literal::Long(value),
                }
            }
            Values::Texts(kind, texts) => {
                let Some(value) = texts.get(at) else { return Ok(None) };
                let wide =
                    || <[u8; 16]>::try_from(&*value).map_err(|_| Error::internal("a wide number of another width"));
                match kind {
                    Kind::String => Literal::String(text(value.into_owned())?),
                    Kind::Int128 => Literal::Int128(i128::from_be_bytes(wide()?)),
                    Kind::UInt128 => Literal::UInt128(u128::from_be_bytes(wide()?)),
                    _ => Literal::Binary(value.into_owned()),
                }
            }
        }))
    }

    /// Whether there is a value.
    pub fn has(&self, at: usize) -> bool {
        match self {
            Values::Numbers(_, numbers) => numbers.present.has(at),
            Values::Texts(_, texts) => texts.present.has(at),
        }
    }

    /// What it takes on the heap.
    pub fn bytes(&self) -> usize {
        match self {
            Values::Numbers(_, numbers) => numbers.bytes(),
            Values::Texts(_, texts) => texts.bytes(),
        }
    }
}

/// # Errors
/// `Internal` if it is no text.
pub fn text(bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| Error::internal(format!("what was kept of a manifest is no text: {e}")))
}

/// As [`iceberg::spec::Datum::try_from_bytes`] reads it, for the type that the value is of.
pub fn bytes(literal: &PrimitiveLiteral) -> Cow<'_, [u8]> {
    use PrimitiveLiteral as Literal;
    match literal {
        Literal::Boolean(value) => vec![u8::from(*value)].into(),
        Literal::Int(value) => value.to_le_bytes().to_vec().into(),
        Literal::Long(value) => value.to_le_bytes().to_vec().into(),
        Literal::Float(value) => value.to_le_bytes().to_vec().into(),
        Literal::Double(value) => value.to_le_bytes().to_vec().into(),
        Literal::String(value) => value.as_bytes().into(),
        Literal::Binary(value) => value.as_slice().into(),
        Literal::Int128(value) => value.to_be_bytes().to_vec().into(),
        Literal::UInt128(value) => value.to_be_bytes().to_vec().into(),
        Literal::AboveMax | Literal::BelowMin => Cow::default(),
    }
}

fn odd() -> Error {
    Error::corrupt("a column of a manifest has values of several kinds")
}

fn kind(literal: &PrimitiveLiteral) -> Option<Kind> {
    use PrimitiveLiteral as Literal;
    Some(match literal {
        Literal::Boolean(_) => Kind::Boolean,
        Literal::Int(_) => Kind::Int,
        Literal::Long(_) => Kind::Long,
        Literal::Float(_) => Kind::Float,
        Literal::Double(_) => Kind::Double,
        Literal::String(_) => Kind::String,
        Literal::Binary(_) => Kind::Binary,
        Literal::Int128(_) => Kind::Int128,
        Literal::UInt128(_) => Kind::UInt128,
        Literal::AboveMax | Literal::BelowMin => return None,
    })
}

fn number(literal: &PrimitiveLiteral) -> Option<i64> {
    use PrimitiveLiteral as Literal;
    Some(match literal {
        Literal::Boolean(value) => i64::from(*value),
        Literal::Int(value) => i64::from(*value),
        Literal::Long(value) => *value,
        Literal::Float(value) => i64::from(value.to_bits()),
        Literal::Double(value) => value.to_bits().cast_signed(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_as_they_were() {
        let (least, most) = (Some(i64::MIN), Some(i64::MAX));
        for (values, bytes) in [
            (vec![], 0),
            (vec![None, None], 8),
            (vec![Some(7); 100], 0),
            (vec![Some(-1), Some(254)], 2),
            (vec![Some(-1), None, Some(255)], 8 + 6),
            (vec![Some(1 << 40), Some((1 << 40) + 70_000)], 8),
            (vec![least, most, Some(0), None, Some(-1)], 8 + 40),
        ] {
            let numbers = Numbers::new(&values);
            let read: Vec<_> = (0..values.len()).map(|at| numbers.get(at)).collect();
            assert_eq!((read, numbers.bytes()), (values, bytes));
        }
    }

    #[test]
    fn texts_come_back_as_they_were_and_what_they_share_is_kept_once() {
        for (values, bytes) in [
            (vec![], 0),
            (vec![None, Some("")], 8 + 8),
            (vec![Some("same"); 100], 4),
            (vec![Some("s3://b/data/1.parquet"), Some("s3://b/data/2.parquet")], 12 + 8 + 2),
            (vec![Some("aa"), Some("a"), Some("aaa")], 1 + 3 + 12),
            (vec![Some("pre-é-post"), None, Some("pre-è-post")], 8 + 5 + 5 + 2 + 12),
        ] {
            let cows: Vec<_> = values.iter().map(|value| value.map(|text| Cow::Borrowed(text.as_bytes()))).collect();
            let texts = Texts::new(&cows).unwrap();
            let read: Vec<_> = (0..values.len()).map(|at| texts.get(at)).collect();
            assert_eq!((read, texts.bytes()), (cows, bytes), "{values:?}");
        }
    }

    #[test]
    fn values_come_back_as_they_were_and_are_of_one_kind() {
        use PrimitiveLiteral as Literal;
        for values in [
            vec![Literal::Boolean(true), Literal::Boolean(false)],
            vec![Literal::Int(i32::MIN), Literal::Int(i32::MAX)],
            vec![Literal::Long(i64::MIN), Literal::Long(7)],
            vec![Literal::Float((-0.0_f32).into()), Literal::Float(f32::NAN.into()), Literal::Float(f32::MIN.into())],
            vec![Literal::Double(f64::NEG_INFINITY.into()), Literal::Double(1.5_f64.into())],
            vec![Literal::String("é".into()), Literal::String("è".into())],
            vec![Literal::Binary(vec![0, 255]), Literal::Binary(vec![])],
            vec![Literal::Int128(-1), Literal::Int128(i128::MAX), Literal::Int128(0)],
            vec![Literal::UInt128(u128::MAX), Literal::UInt128(1)],
        ] {
            let mut given: Vec<_> = values.iter().map(Some).collect();
            given.push(None);
            let kept = Values::new(&given).unwrap();
            for (at, value) in given.into_iter().enumerate() {
                assert_eq!((kept.get(at).unwrap().as_ref(), kept.has(at)), (value, value.is_some()));
            }
        }
        let (int, long, none) = (Literal::Int(1), Literal::Long(1), Literal::AboveMax);
        assert!(Values::new(&[Some(&int), None, Some(&long)]).is_err());
        assert!(Values::new(&[Some(&none)]).is_err());
    }
}
