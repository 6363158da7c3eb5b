package schemas

// PayloadDigest returns the digest by which trajectories name their steps. It is taken over
// the bytes of an encoded event in which the content of each byte string (msgpack's bin) is replaced by its own
// digest by the same algorithm, 32 bytes; code and length before it stay. So a program that has the digests of a step's
// tensors need not hash them again, and still a change of any byte is seen. Bytes that Precheck refuses are an error.
func PayloadDigest(data []byte) (string, error) {
	var bins []span
	if err := precheck(&walker{data: data, bins: &bins}); err != nil {
		return "", err
	}
	return payloadDigest(data, bins, func(i int) [32]byte { return BLAKE3.Sum(data[bins[i].start:bins[i].end]) }), nil
}

// AppendStep is AppendEncode of a step, or of tokens, and the payload digest of what it is encoded to. sums are its
// TensorSums.
func AppendStep(dst []byte, e StepEvent, sums *TensorSums) (data []byte, digest string, err error) {
	bins := make([]span, 0, len(sums.list))
	if data, err = appendEncode(dst, e, &bins); err != nil {
		return nil, "", err
	}
	inline := make([]int, 0, len(sums.list)) // tensors that are byte strings of the event
	for i, t := range e.Tensors() {
		if len(t.Data) > 0 {
			inline = append(inline, i)
		}
	}
	sum := func(i int) [32]byte { return sums.list[inline[i]] }
	return data, payloadDigest(data[len(dst):], bins, sum), nil
}

// payloadDigest returns the payload digest of an encoded event, given where its byte strings are. sum returns the
// digest of byte string i.
func payloadDigest(data []byte, bins []span, sum func(i int) [32]byte) string {
	folded, at := make([]byte, 0, 2048), 0
	for i, b := range bins {
		own := sum(i)
		folded = append(append(folded, data[at:b.start]...), own[:]...)
		at = b.end
	}
	return BLAKE3.Text(BLAKE3.Sum(append(folded, data[at:]...)))
}
