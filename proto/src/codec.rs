//! How messages become bytes: as tonic does it, in memory of the size that they have.
//!
//! A buffer that grows as a message is written into it doubles with each step: what waits for a connection then has up to twice
//! the memory of what was counted.

use std::marker::PhantomData;

use bytes::Bytes;
use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, EncodeBuf, Encoder};
use tonic_prost::ProstDecoder;

/// What comes before a message on a connection: that it is not compressed, and its length.
pub const HEAD_BYTES: usize = 5;

/// A message as it goes over a connection, its head before it, in memory of that size.
///
/// # Panics
/// Never: a `Vec` has room.
pub fn framed(message: &impl Message) -> Bytes {
    let len = message.encoded_len();
    let mut bytes = Vec::with_capacity(HEAD_BYTES + len);
    bytes.push(0);
    bytes.extend_from_slice(&(len as u32).to_be_bytes());
    message.encode(&mut bytes).expect("a Vec has room");
    bytes.into()
}

/// The codec of every generated service: `T` is sent, and `U` is received.
#[derive(Debug, Clone)]
pub struct Exact<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Exact<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + Send + 'static, U: Message + Default + Send + 'static> Codec for Exact<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = ExactEncoder<T>;
    type Decoder = ProstDecoder<U>;

    fn encoder(&mut self) -> ExactEncoder<T> {
        ExactEncoder(PhantomData)
    }

    fn decoder(&mut self) -> ProstDecoder<U> {
        ProstDecoder::default()
    }
}

/// Encodes into a buffer that has grown to the message's size before.
#[derive(Debug, Clone)]
pub struct ExactEncoder<T>(PhantomData<T>);

impl<T: Message> Encoder for ExactEncoder<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.encoded_len());
        item.encode(buffer).map_err(|e| Status::internal(format!("encoding a message: {e}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::v1;

    #[test]
    fn a_framed_message_has_its_length_before_it_and_no_room_behind() {
        let message =
            v1::KeyValue { key: "/kv/a".to_owned(), value: vec![7; 100_000].into(), ..v1::KeyValue::default() };
        let bytes = framed(&message);
        let (head, rest) = bytes.split_at(HEAD_BYTES);
        assert_eq!(head, [&[0][..], &(rest.len() as u32).to_be_bytes()].concat());
        assert_eq!(v1::KeyValue::decode(rest), Ok(message));
        let len = bytes.len();
        assert_eq!(bytes.try_into_mut().unwrap().capacity(), len);
    }
}
