package remoteimage

// DecodeAnswer is decodeAnswer.
var DecodeAnswer = decodeAnswer
