package schemas_test

import (
	"crypto/sha256"
	"encoding/hex"
	"testing"

	"github.com/meander-rl/meander/schemas"
)

// The vectors are those of BLAKE3's authors: bytes 0, 1 ... 250, 0 ... of a block, a chunk and several chunks.
func TestHash(t *testing.T) {
	for n, want := range map[int]string{
		0:      "blake3:af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
		1:      "blake3:2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
		1023:   "blake3:10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
		1024:   "blake3:42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
		1025:   "blake3:d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
		102400: "blake3:bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
	} {
		data := make([]byte, n)
		for i := range data {
			data[i] = byte(i % 251)
		}
		if got := schemas.BLAKE3.Text(schemas.BLAKE3.Sum(data)); got != want {
			t.Errorf("%d bytes: %s, want %s", n, got, want)
		}
		sum := sha256.Sum256(data)
		older := hex.EncodeToString(sum[:])
		for _, digest := range []string{want, older} {
			if !schemas.HasDigest(data, digest) || schemas.HasDigest(append(data, 1), digest) {
				t.Errorf("%d bytes: has not the digest %s, or more bytes have it", n, digest)
			}
		}
		if schemas.HashOf(want) != schemas.BLAKE3 || schemas.HashOf(older) != schemas.SHA256 {
			t.Errorf("%s and %s: by %q and %q", want, older, schemas.HashOf(want), schemas.HashOf(older))
		}
	}
}

// hashSamples are events whose digests name their algorithm; those of the others do not.
func hashSamples(t testing.TB) []sample {
	b3 := func(s string) string { return schemas.BLAKE3.Text(schemas.BLAKE3.Sum([]byte(s))) }
	step := partsStep()
	for i, x := range step.Tensors() {
		x.Ref, x.Parts = nil, &schemas.Parts{First: int64(2 * i), Count: 2, Size: 1 << 20, Digest: b3("latents")}
	}
	e := completedTrajectory(t)
	for i := range e.Steps {
		e.Steps[i].Digest = b3("step")
	}
	e.ContentDigest = b3("content")
	return []sample{{"step-parts", step}, {"trajectory-hashes", e}}
}
