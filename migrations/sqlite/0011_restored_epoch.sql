-- The epoch that a restore began: as long as it is current, no trainer has resumed since, and those of before are to.
ALTER TABLE policy ADD COLUMN restored_epoch INTEGER;
