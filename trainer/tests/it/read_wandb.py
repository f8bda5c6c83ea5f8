"""Prints the records of a .wandb file as a line of JSON each, read by wandb itself."""

import json
import sys

from google.protobuf.json_format import MessageToDict
from wandb.proto.wandb_internal_pb2 import Record
from wandb.sdk.internal.datastore import DataStore

store = DataStore()
store.open_for_scan(sys.argv[1])
while (data := store.scan_data()) is not None:
    record = Record()
    record.ParseFromString(data)
    fields = MessageToDict(record, preserving_proto_field_name=True)
    print(json.dumps({"kind": record.WhichOneof("record_type"), **fields}))
