package schemas

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"

	"github.com/vmihailenco/msgpack/v5"
)

// JSON returns an event, or a part of one, as a value for a JSON encoder. It has the wire's keys.
// Binary data is replaced by its length and digest, and seeds are strings, since most readers of
// JSON round numbers above 2^53.
func JSON(v any) any {
	data, err := msgpack.Marshal(v)
	if err != nil {
		return map[string]any{"error": err.Error()}
	}
	return JSONOfBytes(data)
}

// JSONOfBytes is JSON for an encoded event that was checked before.
func JSONOfBytes(data []byte) any {
	var v any
	if isJSON(data) {
		return json.RawMessage(data)
	}
	if err := msgpack.Unmarshal(data, &v); err != nil {
		return map[string]any{"error": err.Error()}
	}
	return toJSONValue(v)
}

// EncodeAnswer is Encode of the answer to a message, in the encoding of that: who asks in JSON reads JSON.
func EncodeAnswer(to []byte, e Event) ([]byte, error) {
	data, err := Encode(e)
	if err != nil || !isJSON(to) {
		return data, err
	}
	return json.Marshal(JSONOfBytes(data))
}

// toJSONValue replaces in a decoded value what JSON cannot hold. It changes maps and lists in place.
func toJSONValue(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if v[k] = toJSONValue(x); k == "sample_seed" || k == "noise_seed" {
				v[k] = fmt.Sprint(x)
			}
		}
	case []any:
		for i, x := range v {
			v[i] = toJSONValue(x)
		}
	case []byte:
		sum := sha256.Sum256(v)
		return map[string]any{"bytes": len(v), "sha256": hex.EncodeToString(sum[:])}
	case float64:
		switch {
		case math.IsNaN(v): // a number that is not there
			return nil
		case math.IsInf(v, 0):
			return fmt.Sprint(v)
		}
	case float32:
		return toJSONValue(float64(v))
	}
	return v
}
