package schemas

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
)

// Data is what the samples of a prompt are made of before noise is added to it: images, which
// the model's autoencoder encodes, or latents; exactly one of them.
type Data struct {
	// Images are PNGs, one per sample or one for all; animated ones for videos. Their size is that of the samples, also
	// where the prompt names none.
	Images []DataImage `msgpack:"images,omitempty" size:"0..MaxGroupSize" flag:"start-image"`
	// Latents are encoded images, F32, F16 or BF16: [n, S, C], or [1, S, C], one for all.
	Latents *Tensor `msgpack:"latents,omitempty"`
}

// DataImage is a PNG, inline or as a blob that was stored before the prompt.
type DataImage struct {
	// Data is the bytes of the file, where they are carried in the event.
	Data []byte `msgpack:"data,omitempty" size:"1..MaxInlineImage"`
	Ref  *Ref   `msgpack:"ref,omitempty"`
}

// SegmentData is the Data of one sample, resolved. The state that the sample begins with is
// (1-sigma) x0 + sigma noise, with the noise of noise_seed.
type SegmentData struct {
	// Image is the image of this sample.
	Image *Ref `msgpack:"image,omitempty"`
	// Latents are the group's, [n, S, C] or [1, S, C], as a blob.
	Latents *Tensor `msgpack:"latents,omitempty"`
	// GroupDigest is the digest of all images of the group (DataDigest); empty beside Latents.
	GroupDigest string `msgpack:"group_digest,omitempty" form:"digest" digest:"-"`
}

// DataDigest returns the digest of a group's images: the BLAKE3 of the text
// "meander data 1" and the list of their digests (text) in the order of the samples.
func DataDigest(images []Ref) string {
	d := newDigester("meander data 1")
	d.addInteger(int64(len(images)))
	for _, r := range images {
		d.addText(r.Digest)
	}
	return d.text()
}

// Of returns the data of one sample. The images have been stored as blobs.
func (e *Data) Of(sample int64) *SegmentData {
	if e.Latents != nil {
		return &SegmentData{Latents: e.Latents}
	}
	refs := make([]Ref, len(e.Images))
	for i, im := range e.Images {
		if refs[i] = (Ref{Bucket: BlobBucket, Size: int64(len(im.Data))}); im.Ref != nil {
			refs[i] = *im.Ref
		} else {
			sum := sha256.Sum256(im.Data)
			refs[i].Digest = hex.EncodeToString(sum[:])
		}
	}
	if len(refs) == 1 {
		sample = 0
	}
	return &SegmentData{Image: &refs[sample], GroupDigest: DataDigest(refs)}
}

// checkRules checks the data of a group with groupSize samples, 0: not known.
func (e *Data) checkRules(f *faults, groupSize int64) {
	switch n := int64(len(e.Images)); {
	case e.Latents != nil && n > 0:
		f.add("latents", "given", "must be absent beside images")
	case e.Latents != nil:
		e.Latents.checkStates(f.inStruct("latents"), groupSize)
	case n == 0:
		f.add("images", "null", "must be there, or latents: what the samples are made of")
	case groupSize > 0 && n != 1 && n != groupSize:
		f.add("images", strconv.FormatInt(n, 10)+" items", fmt.Sprintf("must be %d, the group_size, or 1 for all",
			groupSize))
	}
	for i := range e.Images {
		if im := &e.Images[i]; (im.Data == nil) == (im.Ref == nil) {
			f.inItem("images", i).add("data", "beside ref or without it", "must be the only one of the two")
		}
	}
}

// checkRules checks start.data of a prompt, the images or latents that a rollout begins from: exactly
// one of the two, with valid digests. Each violation goes to f.
func (e *SegmentData) checkRules(f *faults, groupSize int64) {
	switch {
	case (e.Image == nil) == (e.Latents == nil):
		f.add("image", "beside latents or without them", "must be the only one of the two")
	case e.Latents != nil:
		e.Latents.checkStates(f.inStruct("latents"), groupSize)
	default:
		f.requireDigest("group_digest", e.GroupDigest, FormDigest)
	}
}
