package schemas

import (
	"crypto/sha256"
	"encoding/hex"
)

// PayloadDigest is what trajectories name their steps by, in lower-case hex: the SHA-256 over the bytes of an encoded
// event, in which each byte string (msgpack's bin) has its own SHA-256, 32 bytes, in the place of its content; code and
// length before it stay. So whoever has the digests of a step's tensors does not digest them again, and still no
// byte can change unseen. Bytes that Precheck refuses are an error.
func PayloadDigest(data []byte) (string, error) {
	var bins []span
	if err := precheck(&walker{data: data, bins: &bins}); err != nil {
		return "", err
	}
	return payloadDigest(data, bins, func(i int) [sha256.Size]byte { return sha256.Sum256(data[bins[i].start:bins[i].end]) }), nil
}

// AppendStep is AppendEncode of a step, or of tokens, and the payload digest of what it is encoded to. sums are its TensorSums.
func AppendStep(dst []byte, e StepEvent, sums TensorSums) (data []byte, digest string, err error) {
	bins := make([]span, 0, len(sums))
	if data, err = appendEncode(dst, e, &bins); err != nil {
		return nil, "", err
	}
	inline := make([]int, 0, len(sums)) // tensors that are byte strings of the event
	for i, t := range e.Tensors() {
		if len(t.Data) > 0 {
			inline = append(inline, i)
		}
	}
	return data, payloadDigest(data[len(dst):], bins, func(i int) [sha256.Size]byte { return sums[inline[i]] }), nil
}

// payloadDigest takes the digests of the byte strings, in their order, from sum.
func payloadDigest(data []byte, bins []span, sum func(i int) [sha256.Size]byte) string {
	folded, at := make([]byte, 0, 2048), 0
	for i, b := range bins {
		own := sum(i)
		folded = append(append(folded, data[at:b.start]...), own[:]...)
		at = b.end
	}
	all := sha256.Sum256(append(folded, data[at:]...))
	return hex.EncodeToString(all[:])
}
